"""The update: from the summed gradients to new weights."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from slipstream.job.train import Train
from slipstream.train.optim import build_optimizer, is_matrix, step
from slipstream.train.optim.lean import Lean
from slipstream.train.optim.offload import Offload
from slipstream.train.optim.schedules import batch_factor, rate
from slipstream.train.parallel.split import SplitModel
from slipstream.train.precision import LossScale


@dataclass(frozen=True)
class Updated:
    """What one update did. What only the device knows yet is a tensor there."""

    lr: float
    norm: Tensor | None
    """Norm of all gradients before clipping, where it was needed."""
    skipped: Tensor
    """1 where nothing was updated, 0 where it was."""


class Update:
    """Optimiser, schedule, regularisation, clipping and loss scale, in the order in which they apply."""

    def __init__(self, train: Train, model: SplitModel, total: int, fp16: bool) -> None:
        self._train = train
        self._total = total
        self._model = model
        self._weights = [part.weight for part in model.parts if part.weight.requires_grad]
        self.optimizer = build_optimizer(train.optimizer, self._weights, model.norms.of)
        self.scale = LossScale(fp16)
        offloaded = model.layout.offload == "optimizer"
        self.state_device = torch.device("cpu") if offloaded else self._weights[0].device
        """Where the optimiser's state lives."""
        self._step = Offload(self.optimizer, step).step if offloaded else partial(step, self.optimizer)

    @property
    def waits(self) -> bool:
        """Whether an update must know what the device has found before it can be done: then nothing runs ahead."""
        return self.scale.active or not isinstance(self.optimizer, Lean)

    def apply(self, seen: int, batch: int, loss: Tensor, void: Tensor) -> Updated:
        """Update the weights from their gradients, and forget the gradients. `loss` is that of all workers; where
        `void` is not 0, the gradients mean nothing."""
        lr = self.rate(seen, batch) * self._model.slowing
        self._model.collect_gradients()
        self._unscale()
        self._regularise()
        norm = self._norm()
        skip = self._skip(loss, norm, void)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if isinstance(self.optimizer, Lean) and not self.waits:
            self.optimizer.skip, self.optimizer.factor = skip, self._factor(norm)
            self._step()
        elif not skip:
            self._clip(norm)
            self._step()
        self.scale.record(self.scale.active and norm is not None and not bool(norm.isfinite()))
        self._model.updated()
        return Updated(lr, norm, skip)

    def _skip(self, loss: Tensor, norm: Tensor | None, void: Tensor) -> Tensor:
        """A loss that is not finite updates nothing, unless the job says so; nor do gradients, if it says that."""
        fine = void == 0
        if self._train.on_nonfinite != "warn":
            fine = fine & loss.isfinite()
        if norm is not None and (self.scale.active or self._train.on_nonfinite == "skip"):
            fine = fine & norm.isfinite()
        return 1 - fine.float()

    def rate(self, seen: int, batch: int) -> float:
        """The learning rate of a step."""
        peak = self._train.optimizer.lr * batch_factor(self._train.scale_lr, batch)
        return peak * rate(self._train.schedule, seen, batch, self._total)

    def _gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self._weights if weight.grad is not None]

    def _unscale(self) -> None:
        if self.scale.value != 1.0:
            torch._foreach_mul_(self._gradients(), 1 / self.scale.value)

    def _regularise(self) -> None:
        """The gradients of λ₁·Σ|w| and λ₂/2·Σw²."""
        l1, l2 = self._train.l1, self._train.l2
        if not (l1 or l2):
            return
        for weight in self._weights:
            if weight.grad is not None and is_matrix(weight):
                with torch.no_grad():
                    weight.grad.add_(weight.sign(), alpha=l1).add_(weight, alpha=l2)

    def _norm(self) -> Tensor | None:
        clipping = self._train.clip and self._train.clip.norm
        needed = clipping or self.scale.active or self._train.on_nonfinite == "skip"
        if not needed:
            return None
        return self._model.norms.of_all() if self._model.norms.needed else get_total_norm(self._gradients())

    def _factor(self, norm: Tensor | None) -> Tensor | None:
        """What clipping multiplies by, for an optimiser that does so itself."""
        clip = self._train.clip
        if clip and clip.norm:
            assert norm is not None, "measured because it is needed here"
            return (clip.norm / (norm + 1e-6)).clamp_(max=1.0)
        if clip and clip.value:
            clip_grad_value_(self._weights, clip.value)
        return None

    def _clip(self, norm: Tensor | None) -> None:
        clip = self._train.clip
        if clip and clip.norm:
            assert norm is not None, "measured because it is needed here"
            if not norm + 1e-6 <= clip.norm:  # torch would multiply by one; it adds this much itself
                clip_grads_with_norm_(self._weights, clip.norm, norm)
        elif clip and clip.value:
            clip_grad_value_(self._weights, clip.value)
