"""Built-in models, the user's own and Hugging Face's. A new model is one file and one line in `MODELS`."""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import nn

from slipstream.data.base import Facts
from slipstream.job import Job
from slipstream.job.base import Section
from slipstream.job.models import (
    DecoderModel,
    HuggingFaceModel,
    ImportModel,
    LinearModel,
    MlpModel,
    ResnetModel,
)
from slipstream.train.models.decoder import build_decoder
from slipstream.train.models.huggingface import build_huggingface
from slipstream.train.models.imported import build_imported
from slipstream.train.models.mlp import build_linear, build_mlp
from slipstream.train.models.resnet import build_resnet

MODELS: dict[type[Section], Callable[[Job, Facts], nn.Module]] = {
    DecoderModel: build_decoder,
    ResnetModel: build_resnet,
    MlpModel: build_mlp,
    LinearModel: build_linear,
    ImportModel: build_imported,
    HuggingFaceModel: build_huggingface,
}


def build_model(job: Job, facts: Facts) -> nn.Module:
    """A plain module that takes `Batch.inputs` and returns its outputs.

    Those are logits [B, T, vocabulary] for tokens, logits [B, classes] for classification, numbers [B, k] for
    regression. The weights follow from torch's random state, which the caller seeds; on the meta device there are none.
    """
    return MODELS[type(job.model)](job, facts)


def build_to_split(job: Job, facts: Facts, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A model for a worker that may hold only some of it: one that can make its weights piece by piece comes bare."""
    if isinstance(job.model, DecoderModel):
        with torch.device("meta"):
            return build_model(job, facts).to(dtype)
    return build_model(job, facts).to(device, dtype)


def preload(section: Section) -> None:
    """Import what building this model will need, if it is there, before one process becomes many."""
    if isinstance(section, HuggingFaceModel):
        with suppress(ImportError):  # said, with what to do, by whoever builds it
            import transformers.modeling_utils  # noqa: F401


def is_built_in(section: Section) -> bool:
    """Whether the model is of our own making, and all that its forward leaves behind is ours."""
    return not isinstance(section, ImportModel | HuggingFaceModel)
