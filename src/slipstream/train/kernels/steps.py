"""Functions that torch's compiler takes as one step each, and does not look into."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.library import Library, infer_schema, register_fake

P = ParamSpec("P")
R = TypeVar("R")
_LIBRARY = Library("slipstream", "FRAGMENT")  # type: ignore[no-untyped-call]


def as_one_step(name: str, shaped: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make such a step of a function, which gives new tensors; `shaped` gives their like, without computing them.

    It has no gradient, and nobody would say so: an autograd function must be around it. torch's `custom_op` sees to
    both, and looks at what comes out at each call; that takes the processor as long again.
    """

    def make(function: Callable[P, R]) -> Callable[P, R]:
        schema = name + infer_schema(function, mutates_args=())
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        register_fake(f"slipstream::{name}", shaped, lib=_LIBRARY)
        return cast(Callable[P, R], getattr(torch.ops.slipstream, name).default)

    return make
