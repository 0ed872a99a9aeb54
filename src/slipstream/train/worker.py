"""The model as one worker runs it: its samples forward and backward, gradients on their way to the others."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from slipstream.job import Job
from slipstream.job.data import reset_of
from slipstream.job.exchange import is_balanced
from slipstream.job.job import BATCH_NORM_BALANCED, BATCH_NORM_ON_SERVERS
from slipstream.job.servers import Server
from slipstream.plan import Plan
from slipstream.runs import Pulse
from slipstream.train import tasks
from slipstream.train.batches import MicroBatch, Share, as_model_takes, seed_everything
from slipstream.train.kernels.attention import use_fastest
from slipstream.train.models import is_built_in
from slipstream.train.models.batchnorm import synchronise_batch_norm
from slipstream.train.models.decoder import Decoder
from slipstream.train.models.dropout import own_dropout
from slipstream.train.models.packed import Packed, pack
from slipstream.train.models.resnet import Resnet
from slipstream.train.parallel.split import SplitModel, takes_targets
from slipstream.train.parallel.tensor import VocabularyHead
from slipstream.train.precision import autocast, compute_dtype, weight_dtype
from slipstream.train.world import World


class Worker:
    """What one worker does with its share of a batch."""

    def __init__(self, job: Job, plan: Plan, world: World, pulse: Pulse, plain: nn.Module, white: int) -> None:
        self.job, self.plan, self.world, self._pulse, self._white = job, plan, world, pulse, white
        self._keys = own_dropout(plain, job.seed)
        self._owns_outputs = is_built_in(job.model)  # a user's model may keep its outputs for itself
        normed = synchronise_batch_norm(plain, together=job.exchange.kind != "local")
        if normed and isinstance(job.exchange, Server):
            raise ValueError(BATCH_NORM_ON_SERVERS)
        if normed and is_balanced(job):
            raise ValueError(BATCH_NORM_BALANCED)
        if normed and job.layout.micro_batch:
            raise ValueError(
                "layout.micro_batch would change the curve: this model has batch norm, "
                "which takes its statistics over the whole batch; remove the setting"
            )
        if isinstance(plain, Decoder) and world.device.type == "cuda":
            _choose_attention(plain, job, plan, world.device)
        self.model = SplitModel(plain, job, plan, world.rank, world.device, self._keys, self._around)
        head = next((part for part in plain.modules() if isinstance(part, VocabularyHead)), None)
        self._first_token = head.first if head else None
        self._takes_targets = self.model.pipeline is None and takes_targets(plain)
        self._copying = torch.cuda.Stream() if world.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def forward_backward(self, share: Share, scale: float) -> Tensor:
        """Leave the gradients of the batch's mean loss; return this worker's part of it for each micro-batch."""
        own = [self._own(micro) for micro in share.micro_batches]
        weight = tasks.weight_of_batch(self.job, share.size) or self._agree_on_weight(own)
        here = [self._here(micro) for micro in own]
        losses = (self._through_pipeline if self.model.pipeline else self._one_by_one)(here, weight, scale, share)
        if not losses or not self.model.counts:
            return torch.zeros(len(losses), device=self.world.device)
        return torch.stack(losses)

    def _agree_on_weight(self, micro_batches: list[MicroBatch]) -> float:
        with self._pulse.during("exchange"):
            mine = sum(tasks.weight(self.job.task, micro.targets) for micro in micro_batches)
            total = self.world.sum(torch.tensor(float(mine * self.model.counts_samples), dtype=torch.float64))
        return max(1.0, float(total))

    def judge(self, inputs: Tensor, targets: Tensor, begins: Tensor | None) -> tuple[float, int] | None:
        """Loss and number of right answers of samples that are not learned from, where outputs come out."""
        right = 0
        packed = None if self.model.pipeline else self._pack(begins)  # a stage does it itself
        with autocast(self.plan), self._keys.again(None, Counter(), packed):
            if self._takes_targets:
                return float(self._loss_of(inputs, targets)), right
            outputs = self.model.forward(inputs, torch.zeros(len(inputs), dtype=torch.int64), begins)
            if outputs is None:
                return None
            if tasks.has_accuracy(self.job.task):
                right = tasks.count_right(outputs, targets)
            return float(self._loss_sum(outputs, targets)), right

    def _loss_of(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self._takes_targets:
            loss: Tensor = self.model.whole(inputs, targets)
            return loss
        return self._loss_sum(self.model.whole(inputs), targets)

    def _loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of outputs as they come out of the model here."""
        if self._first_token is None:
            return tasks.loss_sum(self.job.task, outputs, targets, self._owns_outputs and outputs.requires_grad)
        assert self.model.tensor, "it shares out the tokens"
        return tasks.shared_out_loss_sum(outputs, targets, self._first_token, self.model.tensor.group)

    def _one_by_one(self, micro_batches: list[MicroBatch], weight: float, scale: float, share: Share) -> list[Tensor]:
        losses = []
        for number, micro in enumerate(micro_batches, 1):
            with self._pulse.during("forward"), self._around(micro.positions, micro.begins):
                loss = self._loss_of(micro.inputs, micro.targets) / weight
            if number == len(micro_batches):
                self.model.exchange.begin(share.start, share.total)
            with self._pulse.during("backward"):
                (loss * scale).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return losses

    def _through_pipeline(
        self, micro_batches: list[MicroBatch], weight: float, scale: float, share: Share
    ) -> list[Tensor]:
        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            with autocast(self.plan):
                return self._loss_sum(outputs, targets) / weight * scale

        assert self.model.pipeline, "called for it"
        names = ("inputs", "targets", "positions", *(["begins"] if micro_batches[0].begins is not None else []))
        known = {name: torch.cat([getattr(micro, name) for micro in micro_batches]) for name in names}
        inputs, targets = known.pop("inputs"), known.pop("targets")
        with self._pulse.during("forward"):
            losses = self.model.pipeline.forward_backward(inputs, targets, known, len(micro_batches), loss)
        self.model.exchange.begin(share.start, share.total)
        return [value.detach() / scale for value in losses]

    def _own(self, micro: MicroBatch) -> MicroBatch:
        """This worker's part of the sequences."""
        inputs, targets = (self.model.own_tokens(part) for part in (micro.inputs, micro.targets))
        return micro._replace(inputs=inputs, targets=targets)

    def _here(self, micro: MicroBatch) -> MicroBatch:
        begins = None if micro.begins is None else self.here(micro.begins)
        return micro._replace(inputs=self.here(micro.inputs), targets=self.here(micro.targets), begins=begins)

    def here(self, samples: Tensor) -> Tensor:
        """On this worker's device, as the model takes them. A GPU copies and converts them beside what it computes, and
        is not waited for."""
        if not self._copying:
            return as_model_takes(samples, self.job, self._white, weight_dtype(self.plan))
        computing = torch.cuda.current_stream()
        with torch.cuda.stream(self._copying):
            there = samples.contiguous().pin_memory().to(self.world.device, non_blocking=True)
            if isinstance(self.model.whole, Resnet) and there.dim() == 4:
                there = there.contiguous(memory_format=torch.channels_last)  # what cuDNN's fastest kernels want
                ready = as_model_takes(there, self.job, self._white, compute_dtype(self.plan))  # as autocast would
            else:
                ready = as_model_takes(there, self.job, self._white, weight_dtype(self.plan))
        computing.wait_stream(self._copying)
        ready.record_stream(computing)
        return ready

    @contextmanager
    def _around(self, positions: Tensor, begins: Tensor | None = None) -> Iterator[None]:
        """Around the forward of these samples."""
        seed_everything(self.job.seed, int(positions[0]))
        with self._keys.of(positions, self._pack(begins)), autocast(self.plan):
            yield

    def _pack(self, begins: Tensor | None) -> Packed | None:
        if begins is None:
            return None
        assert isinstance(self.model.whole, Decoder), "the job admits no other"
        return pack(begins, self.model.whole, reset_of(self.job.data), compute_dtype(self.plan))


def _choose_attention(model: Decoder, job: Job, plan: Plan, device: torch.device) -> None:
    section, tensor, dtype = model.section, plan.layout.tensor, compute_dtype(plan)
    length = getattr(job.data, "sequence", None)
    if "attention" in reset_of(job.data):  # which has its own kernel
        return
    if length and dtype in (torch.bfloat16, torch.float16) and plan.layout.context == 1:  # a ring has its own kernels
        queries = (plan.layout.micro_batch, section.heads // tensor, length, section.hidden // section.heads)
        use_fastest(queries, (section.kv_heads or section.heads) // tensor, dtype, device)
