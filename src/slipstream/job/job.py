"""The job: what the user wants. Every setting that can be written is defined here or in the sections beside it."""

import math
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from slipstream.job.base import Section, refuse
from slipstream.job.codecs import never_coding
from slipstream.job.data import Data, DigitsData, MnistData, PreparedData, SyntheticData, TextData, of_tokens, reset_of
from slipstream.job.exchange import AllReduce, Exchange, is_balanced
from slipstream.job.machines import Machines
from slipstream.job.models import DecoderModel, HuggingFaceModel, ImportModel, Model, ResnetModel
from slipstream.job.servers import Server
from slipstream.job.train import SHORT, Classification, Evaluate, MaskedToken, NextToken, Regression, Sgd, Task, Train
from slipstream.job.units import Count, Duration, Interval, Money, Number, Seed, Span

OFFLOAD_ON_CPU = "layout.offload has no effect on a CPU: the optimiser's state is in main memory already; leave it out"

FEEDBACK_IN_FP16 = (
    "exchange.codec keeps what it leaves out of gradients for later steps, and in train.precision fp16 their scale "
    "changes from step to step; use bf16 or fp32, or a codec with feedback: false"
)

FP16_ON_SERVERS = (
    "train.precision fp16 does not go with exchange.kind server: workers would have to agree on the scale of their "
    "losses; use bf16 or fp32"
)

BATCH_NORM_BALANCED = (
    "exchange.balance does not go with batch norm: who takes more samples takes them in several micro-batches, and the "
    "statistics are those of the whole batch; set model.norm: group, or leave it out"
)

BATCH_NORM_ON_SERVERS = (
    "exchange.kind server does not go with batch norm, whose statistics are those of the whole batch and no worker "
    "has; set model.norm: group, or use exchange.kind allreduce"
)


LOCAL_IN_FP16 = (
    "exchange.kind local does not go with train.precision fp16, where every worker would scale its loss by a factor of "
    "its own; use bf16 or fp32"
)


class LayoutChoice(Section):
    """How the work is split. What is left out is chosen for the machine; the curve is the same on every layout.

    `layout: auto` chooses all of it, by what the planner predicts for this machine.
    """

    auto: bool = False
    """What `layout: auto` says."""
    replicate: Count | None = None
    """Groups of workers that each hold the whole model. Default: as many as the machine has room for."""
    shard: Count | None = None
    """Workers that share out the weights, gradients and optimiser state of one replica among them (see `sharded`)."""
    tensor: Count | None = None
    """Workers that share out every layer: heads, inner width, vocabulary; and the sequence between them."""
    pipeline: Count | None = None
    """Stages that the layers are cut into, one after the other."""
    context: Count | None = None
    """Workers that share out every sequence, an early and a late part each."""
    micro_batch: Count | None = None
    """Samples a worker takes through the model at once. Default: its whole share of the batch."""
    sharded: Literal["parameters", "gradients", "optimizer"] | None = None
    """What `shard` shares out: all of it, weights regathered for backward too (parameters; ZeRO-3, the default); all of
    it, weights kept from forward to backward (gradients; ZeRO-2); the optimiser's state alone (optimizer; ZeRO-1)."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] | None = None
    """The order in which a pipeline's stages work through the micro-batches. Default: 1f1b."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What of a block's forward is computed again in backward instead of being kept: nothing; all but what matrix
    products and attention gave (in compiled blocks attention too is computed again); everything."""
    offload: Literal["none", "optimizer"] = "none"
    """optimizer: its state lives in main memory and visits the GPU for each update: slower, with the same result."""

    @model_validator(mode="before")
    @classmethod
    def _expand_auto(cls, value: Any) -> Any:
        return {"auto": True} if value == "auto" else value

    @model_validator(mode="after")
    def _check(self) -> "LayoutChoice":
        problems = []
        if self.auto and self.model_fields_set - {"auto"} and self != LayoutChoice.model_construct(auto=True):
            problems.append("auto chooses the whole layout: leave the other keys out, or write all of them")
        if self.sharded and (self.shard or 1) == 1:
            problems.append("sharded has no effect without shard: set shard, or leave it out")
        if self.schedule and (self.pipeline or 1) == 1:
            problems.append("schedule has no effect without pipeline: set pipeline, or leave it out")
        if self.schedule == "zero-bubble" and (self.shard or 1) > 1 and self.sharded != "optimizer":
            problems.append(
                "schedule zero-bubble gives wrong gradients together with sharded weights in torch 2.13; use 1f1b or "
                "interleaved, or sharded: optimizer"
            )
        refuse(problems)
        return self


class Limits(Section):
    """What the run may take. At a limit the run writes a checkpoint and stops; `resume` goes on."""

    deadline: Duration | None = None
    """Longest time, counted over all resumes."""
    budget: Money | None = None
    """Most money. A run on this machine needs `machines.price_per_hour` to know what it costs."""
    clouds: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Plan on these clouds only: aws, gcp, azure, lambda, … Default: all in the table of offers."""
    regions: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Plan in these regions only; `us-*` stands for many."""
    gpus: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Plan on these accelerators only: H100, A100-80GB, …"""
    spot: Literal["never", "also", "only"] = "also"
    """Whether to plan with machines that may be taken away, which cost less."""
    preemption: Number = Field(default=0.05, ge=0)
    """How often a spot machine is taken away in an hour: 0.05 is once in twenty hours."""
    accelerators: Count | None = None
    """Most accelerators at once: a quota."""
    first_step: Duration = 900.0
    """A worker that shows no sign of life for this long before its first step ends is reported as hanging."""
    step: Duration = 120.0
    """The same, after the first step."""

    @field_validator("clouds", "regions", "gpus", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        return [word.strip() for word in value.split(",")] if isinstance(value, str) else value

    @field_validator("spot", mode="before")
    @classmethod
    def _yes_or_no(cls, value: Any) -> Any:
        return {True: "also", False: "never"}.get(value, value) if isinstance(value, bool) else value


class Checkpoint(Section):
    """When the state is saved, so that nothing is lost."""

    every: Interval = Span(0.1, "run")
    """A number of steps, a part of the run (`10%`) or a time (`10m`)."""
    keep: Count = 2
    """How many of the newest to keep."""


class Job(Section):
    """What to train, on what, how, and within which limits."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")
    """Names the run folder: letters, digits, dots, dashes and underscores, at most 80, a letter or digit first."""
    seed: Seed = 0
    """Weights, sample order, dropout and everything random follow from it."""
    model: Model
    """What is trained."""
    data: Data
    """What is learned from."""
    train: Train
    """The recipe."""
    exchange: Exchange = AllReduce()
    """How workers agree."""
    layout: LayoutChoice = LayoutChoice()
    """How the work is split."""
    machines: Machines = Machines()
    """Where it runs."""
    limits: Limits = Limits()
    """What it may take."""
    checkpoint: Checkpoint = Checkpoint()
    """When the state is saved."""

    @property
    def task(self) -> Task:
        """The task as written, or the one the data is made for."""
        if self.train.task is not None:
            return self.train.task
        if self.on_text:
            return NextToken(kind="next-token")
        if isinstance(self.data, (DigitsData, MnistData)):
            return Classification(kind="classification")
        assert isinstance(self.data, SyntheticData), "refused by _check_task"
        return Regression(kind="regression")

    @property
    def on_text(self) -> bool:
        """Whether samples are sequences of tokens."""
        return of_tokens(self.data)

    @property
    def sequence(self) -> int:
        """Tokens in a sample, where samples are sequences of tokens."""
        return self.data.sequence  # type: ignore[union-attr, return-value]

    @model_validator(mode="after")
    def _check(self) -> "Job":
        refuse([*self._task_problems(), *self._effect_problems(), *self._limit_problems()])
        return self

    def _limit_problems(self) -> list[str]:
        patience = getattr(self.data, "patience", None)
        if patience and patience >= self.limits.step:
            return ["data.patience must be shorter than limits.step, after which a waiting worker is taken for hanging"]
        return []

    def _task_problems(self) -> list[str]:
        own_task = self.on_text or isinstance(self.data, DigitsData | MnistData | SyntheticData)
        if self.train.task is None and isinstance(self.data, PreparedData) and not own_task:
            return ["data.sequence is needed where tokens were prepared; train.task where samples were"]
        if self.train.task is None and not own_task:
            return ["train.task is needed for this data: classification or regression (or a token task)"]
        task, own = self.task, isinstance(self.model, ImportModel) or not hasattr(self.data, "source")
        tokens = isinstance(task, (NextToken, MaskedToken))
        if tokens != self.on_text and not own:
            return [f"train.task {task.kind} does not fit data.source {self.data.source!r}"]  # type: ignore[union-attr]
        problems = []
        if isinstance(self.data, PreparedData) and tokens and not self.on_text:
            problems.append(f"data.sequence is needed for train.task {task.kind}: how many tokens make a sample")
        if isinstance(self.data, PreparedData) and self.on_text and not tokens:
            problems.append(f"data.sequence has no effect with train.task {task.kind}, which takes whole samples")
        if isinstance(self.model, DecoderModel) and not isinstance(task, NextToken):
            problems.append(f"model.kind decoder sees only what came before, so it cannot do {task.kind}")
        context = self.model.context if isinstance(self.model, DecoderModel) and self.on_text else None
        if context and self.sequence > context:
            problems.append(f"data.sequence ({self.sequence}) is longer than model.context ({context})")
        if not isinstance(self.model, (DecoderModel, ImportModel, HuggingFaceModel)) and tokens:
            problems.append(f"model.kind {self.model.kind} takes numbers, not tokens; use decoder or huggingface")
        if isinstance(self.model, ResnetModel) and isinstance(self.data, SyntheticData):
            problems.append("model.kind resnet takes images; data.source synthetic has none")
        if isinstance(task, Regression) and isinstance(self.data, (DigitsData, MnistData)):
            problems.append(f"train.task regression does not fit data.source {self.data.source!r}, which has classes")
        if isinstance(task, MaskedToken) and not isinstance(self.data, TextData | PreparedData):
            problems.append("train.task masked-token needs text, whose tokeniser has a mask token")
        if isinstance(task, MaskedToken) and isinstance(self.data, TextData) and not self.data.pack:
            problems.append("train.task masked-token needs data.pack: true")
        return problems

    def _effect_problems(self) -> list[str]:
        """A setting that would have no effect is refused, never ignored."""
        train, problems = self.train, []
        if train.evaluate != Evaluate() and not self.data.validation:
            problems.append(
                "train.evaluate has no effect without held-out samples: set data.validation, for example 5%"
            )
        if train.sample and not (isinstance(self.data, TextData | PreparedData) and isinstance(self.task, NextToken)):
            problems.append("train.sample needs the task next-token on text")
        if train.tokens and not self.on_text:
            problems.append("train.tokens needs data made of tokens; give samples, epochs or steps")
        if self.machines.device == "cpu" and train.precision == "tf32":
            problems.append("train.precision tf32 exists on NVIDIA GPUs only; use fp32 on a CPU")
        if train.precision in SHORT and not isinstance(self.model, DecoderModel):
            problems.append(f"train.precision {train.precision} is for the blocks of decoders; use bf16")
        if train.precision in SHORT and isinstance(self.model, DecoderModel) and self.model.layers == 1:
            problems.append(
                f"train.precision {train.precision} leaves the first block in bf16, and model.layers is 1; use bf16"
            )
        if reset_of(self.data) and not isinstance(self.model, DecoderModel):
            problems.append("data.reset is for model.kind decoder: other models are not told of documents; remove it")
        if self.layout.offload == "optimizer" and self.machines.device == "cpu":
            problems.append(OFFLOAD_ON_CPU)
        if self.layout.offload == "optimizer" and isinstance(train.optimizer, Sgd):
            problems.append("layout.offload has no effect with sgd, which keeps no state")
        if train.precision == "fp16":
            problems += refused_in_fp16(self)
        if is_balanced(self) and self._has_batch_norm:
            problems.append(BATCH_NORM_BALANCED)
        problems += self._server_problems()
        problems += self._codec_problems()
        if self._has_batch_norm and self.layout.micro_batch:
            problems.append(
                "layout.micro_batch would change the curve: batch norm takes its statistics over the whole batch; "
                "remove it, or set model.norm: group"
            )
        return problems

    def _server_problems(self) -> list[str]:
        """What servers cannot do."""
        if not isinstance(self.exchange, Server):
            return []
        problems = []
        if self._has_batch_norm:
            problems.append(BATCH_NORM_ON_SERVERS)
        if self.layout.offload != "none":
            problems.append("layout.offload has no effect with exchange.kind server: the optimiser is on the servers")
        return problems

    def _codec_problems(self) -> list[str]:
        """A codec that the run would end before; where only the data tells how long that is, or batches grow, the
        workers look."""
        if self.train.epochs is not None or (self.train.tokens and not self.on_text) or self.train.ramp:
            return []
        before = (total_samples(self, 0) - 1) // self.train.batch * self.train.batch
        return never_coding(self.exchange.codec, before + self.train.batch, before)

    @property
    def _has_batch_norm(self) -> bool:
        return isinstance(self.model, ResnetModel) and self.model.norm == "batch"


def refused_in_fp16(job: Job) -> list[str]:
    """Why a job's workers cannot agree in train.precision fp16: none if they can."""
    problems = []
    if job.exchange.codec and job.exchange.codec.feedback:
        problems.append(FEEDBACK_IN_FP16)
    if job.exchange.kind == "local":
        problems.append(LOCAL_IN_FP16)
    if isinstance(job.exchange, Server):
        problems.append(FP16_ON_SERVERS)
    return problems


def total_samples(job: Job, training_samples: int) -> int:
    """The length of the run in samples, before rounding up to whole batches."""
    train = job.train
    if train.samples is not None:
        return train.samples
    if train.tokens is not None:
        return math.ceil(train.tokens / job.sequence)
    if train.epochs is not None:
        return math.ceil(train.epochs * training_samples)
    assert train.steps is not None, "Train admits exactly one length"
    return train.steps * train.batch


def dump(job: Job) -> dict[str, Any]:
    """The job as plain values, every default written out, ready for YAML; it reads back as the same job."""
    return job.model_dump(mode="json", by_alias=True)
