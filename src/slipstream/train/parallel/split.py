"""Splitting a plain model over workers: each axis of the layout in turn, from outside."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.job import Job
from slipstream.job.base import refuse
from slipstream.job.codecs import coding_nothing
from slipstream.job.data import reset_of
from slipstream.job.models import HuggingFaceModel, ImportModel
from slipstream.plan import Plan
from slipstream.plan.stages import balance
from slipstream.train.compiled import await_compiler, compile_model
from slipstream.train.exchange import Exchange, build_exchange
from slipstream.train.exchange.adding import matrices_of
from slipstream.train.exchange.base import Sum
from slipstream.train.exchange.local import Local
from slipstream.train.kernels.layers import choose_products
from slipstream.train.models.decoder import Attention, Decoder
from slipstream.train.models.dropout import SampleKeys
from slipstream.train.models.folded import add_rows, fold
from slipstream.train.models.packed import reset_with_documents
from slipstream.train.parallel.context import Places, RingAttention, tokens_of
from slipstream.train.parallel.groups import Groups
from slipstream.train.parallel.parts import Norms, Part, Summed
from slipstream.train.parallel.pipeline import Around, Pipeline, Stage, cost, own_stages
from slipstream.train.parallel.recompute import recompute_blocks
from slipstream.train.parallel.shard import StatePieces, shard_module
from slipstream.train.parallel.tensor import DECODER, Slice, Style, TensorAxis, VocabularyHead


class SplitModel:
    """What one worker holds of a model, and what it knows of the rest."""

    def __init__(
        self, model: nn.Module, job: Job, plan: Plan, rank: int, device: torch.device, keys: SampleKeys, around: Around
    ) -> None:
        refuse(coding_nothing(job.exchange.codec, matrices_of(model)))
        layout = plan.layout
        self.layout, self.groups, self.keys = layout, Groups(layout, rank), keys
        self.place = self.groups.place
        self._canonical = _canonical_names(model)
        self._tied = _tied_names(model)
        self._slices: dict[str, Slice] = {}
        self._holders: dict[str, set[int]] = {}
        costs = [cost(piece) for _, piece in pieces_of(model, job)]  # of whole layers
        self.tensor = self._split_tensors(model, job)
        self._name_of = {weight: self._canonical[name] for name, weight in model.named_parameters()}
        if isinstance(model, Decoder) and (layout.context > 1 or self.tensor):
            self._place_tokens(model, keys)
        if isinstance(model, Decoder):
            reset_with_documents(model, reset_of(job.data), keys)
            add_rows(model, plan)
        self.whole = model
        pieces = pieces_of(model, job)
        blocks = [piece for name, piece in pieces if name.rpartition(".")[2].isdigit()]
        choose_products(blocks, plan)
        if plan.compile:
            fold(blocks, plan)
            at_once = layout.workers == 1 and layout.recompute != "full"
            compile_model(model, blocks, layout.recompute == "selective", at_once)
        if layout.recompute == "full" or (layout.recompute == "selective" and not plan.compile):
            recompute_blocks(blocks, layout.recompute, keys)
        if layout.pipeline > 1:
            await_compiler()  # torch's pipelines load parts of it
        self.pipeline = self._cut(pieces, costs, device, around) if layout.pipeline > 1 else None
        self.modules: list[nn.Module] = list(self.pipeline.stages) if self.pipeline else [model]
        own = {id(part) for module in self.modules for part in module.modules()}
        self.blocks = [block for block in blocks if id(block) in own]
        """The blocks that are here."""
        self.sharded = layout.shares_weights
        fill = partial(self._fill, device=device)
        if self.sharded:
            for module in self.modules:
                mine = [block for block in blocks if any(block is part for part in module.modules())]
                kind = "cpu" if device.type == "meta" else device.type  # a dry run has no device
                shard_module(module, mine, self.groups, kind, layout.sharded == "parameters", fill)
        else:
            for module in self.modules:
                fill(module)
        self._pieces_of_state = StatePieces(self.groups) if layout.shard > 1 and not self.sharded else None
        self.parts = [self._part(name, parameter) for name, parameter in self._named()]
        self.norms = Norms(
            [part for part in self.parts if part.weight.requires_grad],
            self.groups.along("replicate", "shard", "context", "tensor"),
            self.groups.along("pipeline", "replicate", "shard", "context", "tensor"),
        )
        sums = self._sums()
        self._workers_of = {
            w: each.group.size() for each in sums if each.group and not each.last for w in each.parameters
        }
        sharded = self.modules if self.sharded else []
        self.exchange: Exchange = build_exchange(job.exchange, sums, sharded, plan.network, job.seed)
        if isinstance(self.exchange, Local):
            self.exchange.carry(self.buffers())
        self.slowing = 1.0
        """What the learning rate of the next update is multiplied by: less for gradients that come late."""
        self.late: list[int] = []
        """Batches that later ones have overtaken."""

    def keep_only(self, names: Iterable[str], group: dist.ProcessGroup | None) -> None:
        """Forget all parameters but these: the others of a group hold them."""
        mine = set(names)
        for part in self.parts:
            if part.name not in mine:
                part.weight.data = part.weight.data.new_empty(0)
        self.parts = [part for part in self.parts if part.name in mine]
        self.norms = Norms([part for part in self.parts if part.weight.requires_grad], None, group)

    def summed(self) -> Iterator[Summed]:
        """The parameters that are here, and who has gradients of them."""
        for name, parameter in self._named():
            shape, offset = self._whole(name, parameter)
            ends, workers = sorted(self._stages_of(name)), self._workers_of.get(parameter, 1)
            end = ends.index(self.place.pipeline)
            yield Summed(name, parameter, shape, offset, end * workers, len(ends) * workers)

    @property
    def counts(self) -> bool:
        """Whether this worker's loss is part of the sum: of those that compute the same one, the first."""
        return self.place.tensor == 0 and (self.pipeline is None or self.pipeline.holds_last)

    @property
    def counts_samples(self) -> bool:
        """Whether this worker's samples are part of the sum: of those that take the same ones, the first."""
        return self.place.tensor == 0 and self.place.pipeline == 0

    def own_tokens(self, batch: Tensor) -> Tensor:
        """This worker's part of sequences [B, T]."""
        if self.layout.context == 1 or batch.dim() < 2:
            return batch
        return batch[:, tokens_of(self.place.context, self.layout.context, batch.shape[1])]

    def forward(self, inputs: Tensor, positions: Tensor, begins: Tensor | None = None) -> Tensor | None:
        """Outputs without gradients, where they come out."""
        if self.pipeline:
            return self.pipeline.forward(inputs, positions, begins)
        outputs: Tensor = self.whole(inputs)
        return outputs

    def collect_gradients(self) -> None:
        """Give every part its gradient, zero where there is none."""
        for part in self.parts:
            if part.weight.requires_grad:
                gradient = part.gradient()
                part.weight.grad = torch.zeros_like(part.weight) if gradient is None else gradient

    def updated(self) -> None:
        """The parts are updated: forget the gradients, and share what only some have updated."""
        for part in self.parts:
            part.forget()
        self.share_parts()

    def share_parts(self) -> None:
        """Where a worker computes with more than its parts: take what the others have in theirs."""
        if self._pieces_of_state:
            self._pieces_of_state.gather()

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Around forwards that are not for training."""
        for module in self.modules:
            module.eval()
        with torch.no_grad(), self.exchange.agreed():
            yield
        for module in self.modules:
            module.train()
            if self.sharded:
                module.reshard()  # type: ignore[operator]

    def buffers(self) -> dict[str, Tensor]:
        """What is part of the model and not learned."""
        return {
            name: buffer
            for module in self.modules
            for name, buffer in module.state_dict().items()
            if name not in dict(module.named_parameters(remove_duplicate=False))
        }

    def _split_tensors(self, model: nn.Module, job: Job) -> TensorAxis | None:
        group = self.groups.along("tensor")
        if group is None:
            return None
        axis = TensorAxis(group, sequence=isinstance(model, Decoder))
        axis.split(model, _tensor_styles(model, job))
        self._slices = {
            self._canonical[name]: axis.slices[parameter]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if parameter in axis.slices
        }
        return axis

    def _place_tokens(self, model: Decoder, keys: SampleKeys) -> None:
        """Tell the parts that need it which tokens of a sequence are here."""
        places = Places(self.layout, self.place)
        keys.places = model.embed.places = places.in_stream
        if model.rotation is not None:
            model.rotation.places = places.in_attention
        group = self.groups.along("context")
        if group is not None:
            ring = RingAttention(group, self.groups.ranks("context"))
            for part in model.modules():
                if isinstance(part, Attention):
                    part.attend = ring

    def _cut(
        self, pieces: list[tuple[str, nn.Module]], costs: list[float], device: torch.device, around: Around
    ) -> Pipeline:
        cuts = balance(costs, self.layout.stages)
        stages = [
            Stage(number, [pieces[index] for index in cuts[number]], around)
            for number in own_stages(self.layout, self.place.pipeline)
        ]
        self._holders = {
            name: {number for number, cut in enumerate(cuts) if any(_holds(pieces[i], name) for i in cut)}
            for names in self._tied.values()
            for name in names
        }
        own = {parameter for stage in stages for parameter in stage.parameters()}
        for _, piece in pieces:
            for parameter in piece.parameters():
                if parameter not in own:
                    parameter.data = parameter.data.new_empty(
                        0
                    )  # other workers have it; here it would only take memory
        return Pipeline(stages, self.groups, device)

    def _fill(self, module: nn.Module, device: torch.device) -> None:
        """Make the weights of a model that came without them: only the pieces that are here."""
        if device.type == "meta":
            return
        assert isinstance(self.whole, Decoder) or not any(weight.is_meta for weight in module.parameters())
        for parameter in module.parameters():
            if parameter.is_meta:
                values = self._first_values(self.whole, parameter, device).to(parameter.dtype)
                filled = nn.Parameter(values.contiguous(), requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, filled)  # type: ignore[no-untyped-call]  # it stays the one that tied layers share

    def _first_values(self, model: Any, piece: nn.Parameter, device: torch.device) -> Tensor:
        name = self._name_of[piece]
        cut = self._slices.get(name)
        shape, rows = list(piece.shape), range(piece.shape[0])
        if cut:
            shape[cut.dim] = cut.whole
            rows = range(cut.start, cut.start + piece.shape[0]) if cut.dim == 0 else range(shape[0])
        values: Tensor = model.initial(name, torch.Size(shape), rows, device)
        return values[:, cut.start : cut.start + piece.shape[1]] if cut and cut.dim == 1 else values

    def _named(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Every parameter here once, under its first name in the whole model."""
        seen: set[nn.Parameter] = set()
        for module in self.modules:
            for name, parameter in module.named_parameters():
                if parameter in seen:
                    continue
                seen.add(parameter)
                full = module.full_name(name) if isinstance(module, Stage) else name
                yield self._canonical.get(full, full), parameter

    def _part(self, name: str, parameter: nn.Parameter) -> Part:
        layout, (shape, begins) = self.layout, self._whole(name, parameter)
        offset = list(begins)
        copies = layout.replicate * layout.context * layout.tensor * layout.shard
        if name in self._slices:
            copies //= layout.tensor
        weight, gradient = parameter, lambda: parameter.grad
        if self.sharded:
            local: Tensor = parameter.to_local()  # type: ignore[attr-defined]
            rows = -(-parameter.shape[0] // layout.shard)
            offset[0] += min(self.place.shard * rows, parameter.shape[0])
            copies //= layout.shard
            weight = nn.Parameter(local.detach(), requires_grad=parameter.requires_grad)
            gradient = partial(_local_gradient, parameter)
        elif self._pieces_of_state and shape:
            weight, start = self._pieces_of_state.piece(parameter)
            offset[0] += start
            copies //= layout.shard
            gradient = partial(self._pieces_of_state.of_gradient, parameter)
        stages = len(self._stages_of(name))
        return Part(name, weight, shape, tuple(offset), copies, stages, gradient, partial(_forget, parameter, weight))

    def _whole(self, name: str, parameter: nn.Parameter) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of a whole parameter, and where in it this tensor worker's slice begins."""
        shape, offset, cut = list(parameter.shape), [0] * parameter.dim(), self._slices.get(name)
        if cut:
            shape[cut.dim], offset[cut.dim] = cut.whole, cut.start
        return tuple(shape), tuple(offset)

    def _stages_of(self, name: str) -> set[int]:
        """Workers on the pipeline axis that hold a parameter."""
        if not self.pipeline or name not in self._tied:
            return {self.place.pipeline}
        return {stage % self.layout.pipeline for alias in self._tied[name] for stage in self._holders[alias]}

    def _sums(self) -> list[Sum]:
        """Which gradients are summed over which workers."""
        # FSDP2 sums what it shares out over all of these itself.
        data = () if self.sharded else ("replicate", "shard", "context")
        split: list[nn.Parameter] = []
        shared: list[nn.Parameter] = []
        for name, parameter in self._named():
            if parameter.requires_grad:
                in_parts = self.tensor and self.tensor.sequence and name not in self._slices
                (shared if in_parts else split).append(parameter)
        sums = [
            Sum(self.groups.along(*data), split, last=False),
            Sum(self.groups.along(*data, "tensor"), shared, last=self.sharded),
            *self._sums_over_ties(),
        ]
        return [each for each in sums if each.group and each.parameters]

    def _sums_over_ties(self) -> Iterable[Sum]:
        """A tied weight has a gradient from each of its ends."""
        along = self.groups.ranks("pipeline")
        for name in sorted(self._tied):
            stages = sorted(self._stages_of(name))
            if len(stages) > 1 and self.place.pipeline in stages:
                ends = [parameter for known, parameter in self._named() if known == name]
                assert len(ends) == 1, "neighbouring stages are on different workers, and so are the first and the last"
                yield Sum(self.groups.of([along[stage] for stage in stages]), ends, last=True)


def takes_targets(module: nn.Module) -> bool:
    """Whether a model that is whole makes its scores and their loss in one, so that nobody holds all of them."""
    return isinstance(module, Decoder) and not any(isinstance(part, VocabularyHead) for part in module.modules())


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """The first name of every parameter, by each of its names."""
    first: dict[nn.Parameter, str] = {}
    return {
        name: first.setdefault(parameter, name) for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _tied_names(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter that has several, by its first one."""
    names: dict[str, list[str]] = {}
    for name, canonical in _canonical_names(model).items():
        names.setdefault(canonical, []).append(name)
    return {canonical: known for canonical, known in names.items() if len(known) > 1}


def pieces_of(model: nn.Module, job: Job) -> list[tuple[str, nn.Module]]:
    """The modules that a forward passes through one after the other, blocks one by one; the model itself if unknown."""
    before: tuple[str, ...]
    after: tuple[str, ...]
    if isinstance(model, Decoder):
        before, blocks, after = ("embed",), "blocks", ("norm", "head")
    elif isinstance(job.model, ImportModel) and job.model.split and job.model.split.blocks:
        before, blocks, after = job.model.split.before, job.model.split.blocks, job.model.split.after
    else:
        return []
    known = dict(model.named_modules())
    for name in (*before, blocks, *after):
        if name not in known:
            raise ValueError(f"model.split names {name}, and the model has no such module")
    row = known[blocks]
    if not isinstance(row, nn.ModuleList | nn.Sequential):
        raise ValueError(
            f"model.split.blocks: {blocks} is a {type(row).__name__}, not an nn.ModuleList or nn.Sequential"
        )
    pieces = [
        *((name, known[name]) for name in before),
        *((f"{blocks}.{number}", block) for number, block in enumerate(row)),
        *((name, known[name]) for name in after),
    ]
    named = {id(weight) for _, piece in pieces for weight in piece.parameters()}
    for name, weight in model.named_parameters():
        if id(weight) not in named:
            raise ValueError(f"model.split: {name} is in none of the modules that before, blocks and after name")
    return pieces


def _tensor_styles(model: nn.Module, job: Job) -> dict[str, Style]:
    """How tensor workers share out a model's layers."""
    if isinstance(model, Decoder):
        return (
            DECODER
            if model.section.activation == "swiglu"
            else {name: style for name, style in DECODER.items() if not name.endswith("gate")}
        )
    if isinstance(job.model, ImportModel):
        assert job.model.split, "the plan admits no other"
        return dict(job.model.split.tensor)
    assert isinstance(job.model, HuggingFaceModel), "the plan admits no other"
    return _carried_styles(model)


def _carried_styles(model: nn.Module) -> dict[str, Style]:
    """The tensor plan that a Hugging Face model carries, for the layers whose styles are ours too."""
    inner: Any = model.inner
    plan: dict[str, str] | None = getattr(inner.config, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(
            f"layout.tensor: {type(inner).__name__} carries no tensor plan (base_model_tp_plan) to split it by"
        )
    prefix = f"inner.{inner.base_model_prefix}."
    styles: dict[str, Style] = {"colwise": "column", "rowwise": "row"}
    other = sorted({style for style in plan.values() if style not in styles})
    if other:
        raise ValueError(
            f"layout.tensor: the tensor plan of {type(inner).__name__} asks for {', '.join(other)}, not known here"
        )
    return {prefix + pattern: styles[style] for pattern, style in plan.items()}


def _holds(piece: tuple[str, nn.Module], name: str) -> bool:
    return name.startswith(f"{piece[0]}.")


def _local_gradient(parameter: nn.Parameter) -> Tensor | None:
    gradient: Any = parameter.grad
    return None if gradient is None else gradient.to_local()


def _forget(parameter: nn.Parameter, weight: nn.Parameter) -> None:
    parameter.grad = weight.grad = None
