"""Optimisers, schedules, and how the batch moves the learning rate."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from slipstream.job.train import Adam, AdamW, Lamb, Lars, Momentum, Nesterov, Sgd
from slipstream.train.optim.adamw import LeanAdamW
from slipstream.train.optim.lamb import LAMB
from slipstream.train.optim.lars import LARS
from slipstream.train.optim.sgd import LeanSGD
from slipstream.train.optim.trust import Norm

AnyOptimizer = Sgd | Momentum | Nesterov | Adam | AdamW | Lars | Lamb
Groups = list[dict[str, Any]]

OPTIMIZERS: dict[type[AnyOptimizer], Callable[[Groups, Any, Norm], torch.optim.Optimizer]] = {
    Sgd: lambda groups, o, _: _sgd(groups)(groups, lr=o.lr, fused=True),
    Momentum: lambda groups, o, _: _sgd(groups)(groups, lr=o.lr, momentum=o.momentum, fused=True),
    Nesterov: lambda groups, o, _: _sgd(groups)(groups, lr=o.lr, momentum=o.momentum, nesterov=True, fused=True),
    Adam: lambda groups, o, _: _adamw(groups, o),
    AdamW: lambda groups, o, _: _adamw(groups, o),
    Lars: lambda groups, o, norm: LARS(groups, o.lr, o.momentum, o.weight_decay, o.trust, norm),
    Lamb: lambda groups, o, norm: LAMB(groups, o.lr, o.betas, o.eps, o.weight_decay, norm),
}


def _sgd(groups: Groups) -> type[torch.optim.SGD]:
    """Ours on a GPU; its kernel clips in fp32 only."""
    weight: nn.Parameter = groups[0]["params"][0]
    return LeanSGD if weight.is_cuda and weight.dtype == torch.float32 else torch.optim.SGD


def _adamw(groups: Groups, setting: Any) -> torch.optim.Optimizer:
    """Ours on a GPU and where the state is narrow; on a CPU torch's. Adam is AdamW without decay."""
    weight: nn.Parameter = groups[0]["params"][0]
    if setting.state == "bf16" or (weight.is_cuda and weight.dtype == torch.float32):
        dtype = torch.bfloat16 if setting.state == "bf16" else torch.float32
        return LeanAdamW(groups, setting.lr, setting.betas, setting.eps, dtype)
    return torch.optim.AdamW(groups, lr=setting.lr, betas=setting.betas, eps=setting.eps, fused=True)


def build_optimizer(setting: AnyOptimizer, weights: Sequence[nn.Parameter], norm: Norm) -> torch.optim.Optimizer:
    """The optimiser, over two groups: matrices, which decay and adapt, and the rest, which do not.

    The weights may be pieces; `norm` tells the norms of the wholes.
    """
    _leave_compiler_asleep()
    if not weights:
        raise ValueError("the model has no parameter to train: every one has requires_grad=False")
    decay = getattr(setting, "weight_decay", 0.0)
    groups: Groups = [
        {"params": [w for w in weights if is_matrix(w)], "weight_decay": decay, "adapt": True},
        {"params": [w for w in weights if not is_matrix(w)], "weight_decay": 0.0, "adapt": False},
    ]
    return OPTIMIZERS[type(setting)]([group for group in groups if group["params"]], setting, norm)


def step(optimizer: torch.optim.Optimizer) -> None:
    """Update the weights, without the import of torch's compiler that `optimizer.step()` begins with.

    That takes over a second of every start, and nothing of an update is compiled here. What torch wraps around the
    step besides is the switching off of gradients, done here, and hooks, which we do not use.
    """
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)


def _leave_compiler_asleep() -> None:
    """The same for the other methods: torch marks them as not to be compiled, and asks the compiler how to do that."""
    for method in vars(torch.optim.Optimizer).values():
        if plain := getattr(method, "__wrapped__", None):
            plain.__dynamo_disable = plain


def is_matrix(weight: nn.Parameter) -> bool:
    """Whether weight decay, L1, L2 and trust ratios apply: to matrices, not to biases and norms."""
    return weight.ndim >= 2
