"""Batch norm over the whole batch of all workers (torch's SyncBatchNorm is for GPUs only)."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from slipstream.train.kernels.dtypes import cast

_REPLACED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class GlobalBatchNorm(_BatchNorm):
    """`nn.BatchNorm` of any dimension whose statistics in training are those of the global batch.

    Workers may hold different numbers of samples, also none. Gradients of weight and bias are this worker's share:
    the exchange adds them up, as it does for every parameter.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        """Any dimension will do."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or _ranks() == 1:
            output: Tensor = super().forward(input)
            return output
        count, mean, variance = _global_statistics(input.detach())
        self._track(count, mean, variance)
        return _normalise(input, self.weight, self.bias, count, mean, variance, self.eps)

    def _track(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        # Without momentum torch keeps the plain mean over all batches.
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


def synchronise_batch_norm(model: nn.Module, together: bool = True) -> int:
    """Replace every `nn.BatchNorm1d`, 2d and 3d of a model; say how many there are. Names and tensors stay the same.
    Where workers do not update together, each has the statistics of its own samples, as torch takes them."""
    found = [(name, part) for name, part in model.named_modules(remove_duplicate=False) if type(part) in _REPLACED]
    if not together:
        return len(found)
    swapped: dict[nn.Module, GlobalBatchNorm] = {}
    for name, part in found:
        assert isinstance(part, _BatchNorm)
        swapped[part] = swapped.get(part) or _swap(part)
        model.set_submodule(name, swapped[part])
    return len(swapped)


def _swap(old: _BatchNorm) -> GlobalBatchNorm:
    new = GlobalBatchNorm(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats, device="meta")
    for name, tensor in (*old.named_parameters(recurse=False), *old.named_buffers(recurse=False)):
        setattr(new, name, tensor)
    return new.train(old.training)


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _global_statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and biased variance per channel over all ranks, the same on each, in fp64.

    Parts are combined with the pairwise update of Chan, Golub and LeVeque (1979), which does not cancel.
    """
    channels, count = x.shape[1], x.numel() // x.shape[1]
    local = x.new_zeros(1 + 2 * channels, dtype=torch.float64)
    if count:
        variance, mean = torch.var_mean(_full(x), _reduced(x), correction=0)
        local[0], local[1 : 1 + channels], local[1 + channels :] = count, mean, variance * count
    parts = [torch.empty_like(local) for _ in range(_ranks())]
    dist.all_gather(parts, local)
    counts, means, squares = torch.split(torch.stack(parts), [1, channels, channels], dim=1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    variance = (squares + counts * (means - mean).square()).sum(0) / total
    return total, mean, variance


class _Normalise(torch.autograd.Function):
    """y = x̂·w + b with x̂ = (x - mean)/std, where mean and std depend on every x of every rank."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        count: Tensor,
        mean: Tensor,
        variance: Tensor,
        eps: float,
    ) -> Tensor:
        full = _full(x)
        mean, inverse = mean.to(full.dtype), (variance + eps).rsqrt().to(full.dtype)
        ctx.save_for_backward(x, weight, count, mean, inverse)  # type: ignore[arg-type]
        scale = inverse if weight is None else inverse * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        return cast(full * _wide(scale, x) + _wide(shift, x), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The usual formula (Ioffe and Szegedy 2015, arXiv 1502.03167), its two sums taken over all ranks."""
        x, weight, count, mean, inverse = ctx.saved_tensors  # type: ignore[attr-defined]
        dy = _full(grads[0])
        normal = (_full(x) - _wide(mean, x)) * _wide(inverse, x)
        of_bias, of_weight = dy.sum(_reduced(x)), (dy * normal).sum(_reduced(x))
        dx = None
        if ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
            sums = torch.stack((of_bias, of_weight)).double()
            dist.all_reduce(sums)
            average, slope = (sums / count).to(dy.dtype)
            scale = inverse if weight is None else inverse * weight
            dx = ((dy - _wide(average, x) - normal * _wide(slope, x)) * _wide(scale, x)).to(x.dtype)
        learned = weight is not None
        return dx, of_weight if learned else None, of_bias if learned else None, None, None, None, None


_normalise: Callable[..., Tensor] = _Normalise.apply


def _reduced(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _wide(channel: Tensor, x: Tensor) -> Tensor:
    return channel.view(1, -1, *(1,) * (x.dim() - 2))


def _full(x: Tensor) -> Tensor:
    """bf16 and fp16 are too coarse for sums."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
