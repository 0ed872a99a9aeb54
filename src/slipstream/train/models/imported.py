"""The user's own model, by import."""

from torch import nn

from slipstream.data.base import Facts
from slipstream.data.importing import call_target
from slipstream.job import Job
from slipstream.job.models import ImportModel


def build_imported(job: Job, _facts: Facts) -> nn.Module:
    section = job.model
    assert isinstance(section, ImportModel)
    model = call_target(section.target, section.args, "model.import")
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model.import: {section.target} returned {type(model).__name__}; it must return a torch.nn.Module"
        )
    return model
