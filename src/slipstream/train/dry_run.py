"""A dry run: one rank of a layout of any size, built with nobody to talk to and without memory, and what it would hold.

torch's fake process group answers for all the others, and the meta device has shapes without numbers: so the code that
splits the model is the very one that a real run uses.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.data.base import Facts
from slipstream.job import Job
from slipstream.job.models import DecoderModel
from slipstream.job.servers import Server
from slipstream.plan import Layout, Plan
from slipstream.plan.exchange import served
from slipstream.plan.wanted import states_of
from slipstream.train.kernels.linear_cross_entropy import ROWS
from slipstream.train.models import build_model
from slipstream.train.models.decoder import Attention
from slipstream.train.models.dropout import own_dropout
from slipstream.train.parallel.pipeline import Stage
from slipstream.train.parallel.recompute import KEPT
from slipstream.train.parallel.split import SplitModel, pieces_of, takes_targets
from slipstream.train.precision import compute_dtype
from slipstream.train.server.flat import share_out

META = torch.device("meta")


@dataclass(frozen=True)
class Held:
    """What one rank holds, in bytes."""

    rank: int
    layout: str
    precision: str
    """In which activations are counted."""
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Weights of other workers that are here while they are needed: two blocks at a time, or all where kept."""
    activations: int
    """Kept from forward to backward, for all micro-batches that are on their way at once."""
    offloaded: int
    """Not on the accelerator but in main memory, and not in the total."""
    exchange: dict[str, int]
    """What the exchange holds beside gradients, by the planner's names; only what there is."""
    served: int
    """What all servers hold together, in main memory beside the workers, and not in the total."""

    @property
    def total(self) -> int:
        """All of it."""
        state = self.parameters + self.gradients + self.optimizer + sum(self.exchange.values())
        return state + self.gathered + self.activations


def dry_run(job: Job, plan: Plan, rank: int, facts: Facts) -> Held:
    """Build one rank of the plan and count."""
    layout = plan.layout
    with _alone_in(layout.workers, rank):
        split = _split(job, plan, rank, facts, torch.float32)
        parts = [part for part in split.parts if part.weight.requires_grad]
        # Gradients of weights that are kept whole are whole; the optimiser's state is that of the parts.
        whole = sum(_bytes(weight) for module in split.modules for weight in module.parameters())
        held = whole if layout.sharded == "optimizer" else sum(_bytes(part.weight) for part in split.parts)
        state = int(states_of(job.train.optimizer) * sum(_bytes(part.weight) for part in parts))
        offloaded = layout.offload == "optimizer"
        gathered, exchange = _gathered(split, layout), _exchanged(split, job)
        try:
            activations = _activations(job, plan, rank, facts)
        except (RuntimeError, IndexError) as error:
            raise ValueError(f"the model cannot be run on {layout}, without numbers: {error}") from error
    servers = 0
    if isinstance(job.exchange, Server):  # they have the optimiser
        share_out({part.name: _bytes(part.weight) for part in split.parts}, job.exchange.servers)
        servers, state = served(job.exchange, layout.workers, held, state), 0
    at_home, away = (0, state) if offloaded else (state, 0)
    return Held(rank, str(layout), plan.precision, held, held, at_home, gathered, activations, away, exchange, servers)


@contextmanager
def _alone_in(workers: int, rank: int) -> Iterator[None]:
    if workers == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=workers, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _split(job: Job, plan: Plan, rank: int, facts: Facts, dtype: torch.dtype) -> SplitModel:
    with META:
        model = build_model(job, facts).to(dtype)
    keys = own_dropout(model, job.seed)
    uncompiled = plan.model_copy(update={"compile": False})
    split = SplitModel(model, job, uncompiled, rank, META, keys, keys.of)
    for part in model.modules():
        if isinstance(part, Attention):
            part.attend = _attend
    return split


class _Attend(torch.autograd.Function):
    """Keeps what a fused attention kernel keeps; on the meta device torch has only the one that keeps all scores."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output, totals = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, output, totals)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_attend: Callable[[Tensor, Tensor, Tensor], Tensor] = _Attend.apply


def _activations(job: Job, plan: Plan, rank: int, facts: Facts) -> int:
    """Bytes that autograd keeps of a forward, in the precision of the run."""
    layout = plan.layout
    # Sharing out weights changes nothing here, and FSDP2 would ask the others for theirs.
    unsharded = layout.model_copy(update={"replicate": layout.data, "shard": 1})
    dtype = compute_dtype(plan)
    split = _split(job, plan.model_copy(update={"layout": unsharded}), rank, facts, dtype)
    positions = torch.zeros(layout.micro_batch, dtype=torch.int64)
    in_flight = _in_flight(job, layout, split.place.pipeline)
    kept = 0
    for module in split.modules:
        last = not isinstance(module, Stage) or module.number == layout.stages - 1
        inputs = _input(module, job, layout, facts, dtype)
        around = nullcontext() if isinstance(module, Stage) else split.keys.of(positions)
        with around:
            kept += _kept(module, inputs, positions, last, layout.recompute == "selective")
    return in_flight * kept


def _input(module: nn.Module, job: Job, layout: Layout, facts: Facts, dtype: torch.dtype) -> Tensor:
    """What a module is given: samples, or for a later stage what the modules before it give."""
    if not isinstance(module, Stage) or module.number == 0:
        shape = (facts.inputs[0] // layout.context, *facts.inputs[1:]) if facts.tokens else facts.inputs
        kind = torch.int64 if facts.tokens else dtype
        return torch.empty(layout.micro_batch, *shape, dtype=kind, device=META)
    if isinstance(job.model, DecoderModel):
        length = facts.inputs[0] // layout.context // layout.tensor
        stream = torch.empty(layout.micro_batch, length, job.model.hidden, dtype=dtype, device=META)
        return stream.requires_grad_()
    with META:
        whole = build_model(job, facts).to(dtype)
    keys = own_dropout(whole, job.seed)
    x = torch.empty(layout.micro_batch, *facts.inputs, dtype=torch.int64 if facts.tokens else dtype, device=META)
    with torch.no_grad(), _KeptOnPurpose(selective=False), keys.of(torch.zeros(layout.micro_batch, dtype=torch.int64)):
        for name, piece in pieces_of(whole, job):
            if name == module.names[0]:
                break
            x = piece(x)
    return x.requires_grad_() if x.is_floating_point() else x


def kept_for_backward(module: nn.Module, inputs: Tensor) -> int:
    """Bytes that a forward of a whole model leaves for backward, beside the parameters."""
    return _kept(module, inputs, torch.empty(0), last=False, selective=False)


def _kept(module: nn.Module, inputs: Tensor, positions: Tensor, last: bool, selective: bool) -> int:
    known = {weight.untyped_storage()._cdata for weight in module.parameters()}
    kept: dict[int, int] = {}
    alive: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage.nbytes()
            alive.append(storage)  # its number must not be given to another
        return tensor

    kept_on_purpose = _KeptOnPurpose(selective)
    with saved_tensors_hooks(pack, lambda tensor: tensor), kept_on_purpose:
        outputs: Tensor = module(inputs, positions) if isinstance(module, Stage) else module(inputs)
    return sum(kept.values()) + kept_on_purpose.bytes + (_scores(module, outputs) if last else 0)


def _scores(module: nn.Module, outputs: Tensor) -> int:
    """What the loss works on: all scores, in fp32 and in place, or those of some tokens at a time."""
    if not takes_targets(module):
        return 4 * outputs.numel()
    classes = outputs.shape[-1]
    return outputs.element_size() * classes * min(outputs.numel() // classes, ROWS)


class Unanswered(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Who asks for a number, which there is not, gets 1: models ask such things as whether any token is masked."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1
        return func(*args, **(kwargs or {}))


class _KeptOnPurpose(Unanswered):
    """Counts what selective recomputation keeps, which autograd does not see."""

    def __init__(self, selective: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._selective, self.bytes = selective, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._selective and func in KEPT:
            first = result[0] if isinstance(result, tuple) else result
            self.bytes += _bytes(first)
        return result


def _gathered(split: SplitModel, layout: Layout) -> int:
    """FSDP2 holds the weights of the block that computes and of the one after it, and those of no block."""
    if not split.sharded:
        return 0
    blocks = [sum(weight.numel() for weight in block.parameters()) for block in split.blocks]
    everything = sum(weight.numel() for module in split.modules for weight in module.parameters())
    if layout.sharded == "gradients":
        return 4 * everything
    return 4 * (everything - sum(blocks) + sum(sorted(blocks)[-2:]))


def _exchanged(split: SplitModel, job: Job) -> dict[str, int]:
    """What the exchange itself says, and the gradients on their way to servers, which share a machine's memory."""
    held = split.exchange.held_bytes()
    if isinstance(job.exchange, Server) and job.machines.device == "cpu":
        held = {"travelling": sum(_bytes(part.weight) for part in split.parts)}
    largest_share = -(-job.train.batch // split.layout.data)
    if largest_share <= split.layout.micro_batch:  # gradients lie in the buckets
        held.pop("buckets", None)
    return {name: size for name, size in held.items() if size}


def _in_flight(job: Job, layout: Layout, stage: int) -> int:
    """Micro-batches whose activations a worker holds at once, at most."""
    if layout.pipeline == 1:
        return 1
    count = job.train.batch // (layout.data * layout.micro_batch)
    return count if layout.schedule == "gpipe" else min(count, layout.pipeline - stage)


def _bytes(tensor: Tensor) -> int:
    local: Any = tensor
    local = local.to_local() if hasattr(local, "to_local") else local
    return int(local.numel() * local.element_size())
