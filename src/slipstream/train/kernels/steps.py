"""Functions that torch's compiler takes as one step each, and does not look into."""

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, infer_schema, register_fake

Function = Callable[..., Any]
_LIBRARY = Library("slipstream", "FRAGMENT")  # type: ignore[no-untyped-call]


def as_one_step(name: str, shaped: Function) -> Callable[[Function], Function]:
    """Make such a step of a function; `shaped` gives tensors like those that it gives, without computing them.

    torch's `custom_op` does the same and looks at what comes out, at each call: that takes the processor as long again.
    """

    def make(function: Function) -> Function:
        schema = name + infer_schema(function, mutates_args=())
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        register_fake(f"slipstream::{name}", shaped, lib=_LIBRARY)
        step: Function = getattr(torch.ops.slipstream, name).default
        return step

    return make
