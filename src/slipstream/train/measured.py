"""The work of any `nn.Module`, by running it on the meta device: shapes without numbers, and no memory."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from slipstream.data.base import Facts
from slipstream.job import Job
from slipstream.plan.rates import fitted_rates
from slipstream.plan.work import Matrix, Product, Work
from slipstream.train.dry_run import META, Unanswered, kept_for_backward
from slipstream.train.exchange.adding import matrices_of
from slipstream.train.models import build_model
from slipstream.train.models.dropout import own_dropout

aten: Any = torch.ops.aten
_TRAFFIC = 2.5
"""How often an element-wise operation moves each number that it gives: it reads one or two, and writes one."""


def measured_work(job: Job, facts: Facts) -> Work:
    """What one sample of a model costs. A model that cannot run on the meta device raises ValueError."""
    with META:
        model = build_model(job, facts)
    keys = own_dropout(model, job.seed)
    samples = 2  # some models refuse one
    kind = torch.int64 if facts.tokens else torch.float32
    inputs = torch.empty(samples, *facts.inputs, dtype=kind, device=META)
    positions = torch.zeros(samples, dtype=torch.int64)
    counter = _Counter()
    try:
        with keys.of(positions), torch.no_grad(), counter:
            outputs: Tensor = model(inputs)
        with keys.of(positions):
            kept = kept_for_backward(model, inputs)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"the model cannot be measured on the meta device, where tensors have no numbers: {error}"
        ) from error
    parameters = sum(weight.numel() for weight in model.parameters())
    elements = _TRAFFIC * counter.elements / samples / fitted_rates().stream_traffic
    return Work(
        layers=1,
        tokens=1,
        stream=elements,
        inner=0,
        keys=0,
        heads=0,
        block=tuple(Product(m / samples, n, k) for m, n, k in counter.products),
        head=(),
        attention=0,
        outputs=outputs.numel() / samples,
        kept_stream=0,
        kept_inside=kept / samples / 4,  # it was run in fp32
        fused=0.0,
        products_inside=0,
        block_parameters=parameters,
        table_parameters=0,
        head_parameters=0,
        matrices=tuple(Matrix(*each) for each in matrices_of(model)),
    )


class _Counter(Unanswered):
    """Notes the shapes of products, and counts what all else gives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[tuple[float, float, float]] = []
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        first = result[0] if isinstance(result, tuple) else result
        if func in (aten.mm.default, aten.addmm.default):
            a, b = args[-2:] if func is aten.mm.default else args[1:3]
            self.products.append((a.shape[0], b.shape[1], a.shape[1]))
        elif func is aten.bmm.default:
            self.products.append((prod(args[0].shape[:2]), args[1].shape[2], args[0].shape[2]))
        elif func is aten.convolution.default:
            weight = args[1]
            self.products.append((first.shape[0] * prod(first.shape[2:]), weight.shape[0], prod(weight.shape[1:])))
        elif isinstance(first, Tensor) and not _is_view(func):
            self.elements += first.numel()
        return result


def _is_view(func: Any) -> bool:
    return any(argument.alias_info and not argument.alias_info.is_write for argument in func._schema.arguments)
