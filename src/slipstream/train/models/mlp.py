"""A multi-layer perceptron over flattened inputs; with no hidden layer it is linear or logistic regression."""

import itertools
import math
from collections.abc import Sequence

from torch import nn

from slipstream.data.base import Facts
from slipstream.job import Job
from slipstream.job.models import LinearModel, MlpModel

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}


def build_mlp(job: Job, facts: Facts) -> nn.Module:
    section = job.model
    assert isinstance(section, MlpModel)
    return _perceptron(facts, section.hidden, _ACTIVATIONS[section.activation], section.dropout)


def build_linear(job: Job, facts: Facts) -> nn.Module:
    assert isinstance(job.model, LinearModel)
    return _perceptron(facts, (), nn.Identity, 0.0)


def _perceptron(facts: Facts, hidden: Sequence[int], activation: type[nn.Module], dropout: float) -> nn.Module:
    if facts.tokens:
        raise ValueError("model.kind mlp and linear take numbers, and the data has tokens; use decoder or huggingface")
    widths = (math.prod(facts.inputs), *hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), activation(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], facts.outputs))
