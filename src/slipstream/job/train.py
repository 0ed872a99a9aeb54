"""`train:` the recipe. Length, batch, task, optimiser, schedule, regularisation, precision."""

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, Tag, field_validator, model_validator

from slipstream.job.base import Named, Section, Shorthand, choice, refuse
from slipstream.job.units import Count, Fraction, Number, SampleSpan, SampleSpanOrZero, Span, StepInterval

# --- tasks -----------------------------------------------------------------------------------------------------------


class _Task(Named):
    key = "kind"


class NextToken(_Task):
    """Predict each next token."""

    kind: Literal["next-token"]
    """The task's name."""


class MaskedToken(_Task):
    """Predict hidden tokens from both sides (Devlin et al. 2018, arXiv 1810.04805)."""

    kind: Literal["masked-token"]
    """The task's name."""
    mask: Fraction = Field(default=0.15, gt=0)
    """Part of the tokens hidden. Which ones belongs to the sample and its epoch."""


class Classification(_Task):
    """Choose one class; cross-entropy."""

    kind: Literal["classification"]
    """The task's name."""
    label_smoothing: Fraction = 0.0
    """Probability spread over all classes."""


class Regression(_Task):
    """Predict numbers; mean squared error."""

    kind: Literal["regression"]
    """The task's name."""


Task = Annotated[
    Annotated[NextToken, Tag("next-token")]
    | Annotated[MaskedToken, Tag("masked-token")]
    | Annotated[Classification, Tag("classification")]
    | Annotated[Regression, Tag("regression")],
    choice("kind", shorthand=True),
    Shorthand(),
]

# --- optimisers ------------------------------------------------------------------------------------------------------


Beta = Annotated[Number, Field(ge=0, lt=1)]


class _Optimizer(Section):
    lr: Number = Field(gt=0)
    """Peak learning rate."""


class Sgd(_Optimizer):
    """Stochastic gradient descent."""

    name: Literal["sgd"]
    """The optimiser's name."""


class Momentum(_Optimizer):
    """Gradient descent with heavy-ball momentum."""

    name: Literal["momentum"]
    """The optimiser's name."""
    momentum: Number = Field(default=0.9, gt=0, lt=1)
    """Part of the last update that is kept."""


class Nesterov(_Optimizer):
    """Gradient descent with Nesterov's momentum."""

    name: Literal["nesterov"]
    """The optimiser's name."""
    momentum: Number = Field(default=0.9, gt=0, lt=1)
    """Part of the last update that is kept."""


class _Adaptive(_Optimizer):
    state: Literal["fp32", "bf16"] = "fp32"
    """In what the two running means are held: bf16 halves their memory, and rounds the second at random."""


class Adam(_Adaptive):
    """Adam (Kingma and Ba 2014, arXiv 1412.6980)."""

    name: Literal["adam"]
    """The optimiser's name."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the two running means."""
    eps: Number = Field(default=1e-8, gt=0)
    """Added to the denominator."""


class AdamW(_Adaptive):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017, arXiv 1711.05101)."""

    name: Literal["adamw"]
    """The optimiser's name."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the two running means."""
    eps: Number = Field(default=1e-8, gt=0)
    """Added to the denominator."""
    weight_decay: Number = Field(default=0.1, ge=0)
    """On matrices only: biases and norms do not decay."""


class Lars(_Optimizer):
    """Momentum with a trust ratio for each tensor (You et al. 2017, arXiv 1708.03888), for large batches."""

    name: Literal["lars"]
    """The optimiser's name."""
    momentum: Number = Field(default=0.9, ge=0, lt=1)
    """Part of the last update that is kept."""
    weight_decay: Number = Field(default=1e-4, ge=0)
    """On matrices only: biases and norms neither decay nor take a trust ratio."""
    trust: Number = Field(default=1e-3, gt=0)
    """The trust coefficient."""


class Lamb(_Optimizer):
    """Adam with a trust ratio for each tensor (You et al. 2019, arXiv 1904.00962), for large batches."""

    name: Literal["lamb"]
    """The optimiser's name."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the two running means."""
    eps: Number = Field(default=1e-6, gt=0)
    """Added to the denominator."""
    weight_decay: Number = Field(default=0.01, ge=0)
    """On matrices only: biases and norms neither decay nor take a trust ratio."""


Optimizer = Annotated[
    Annotated[Sgd, Tag("sgd")]
    | Annotated[Momentum, Tag("momentum")]
    | Annotated[Nesterov, Tag("nesterov")]
    | Annotated[Adam, Tag("adam")]
    | Annotated[AdamW, Tag("adamw")]
    | Annotated[Lars, Tag("lars")]
    | Annotated[Lamb, Tag("lamb")],
    choice("name"),
]

# --- schedules: how the learning rate moves, counted in samples ------------------------------------------------------


class _Schedule(Named):
    key = "decay"

    warmup: SampleSpanOrZero = Span(0.0, "run")
    """The rate rises linearly from 0 over this part of the run (`2%`) or this many samples."""


class Constant(_Schedule):
    """The rate stays."""

    decay: Literal["constant"]
    """The schedule's name."""


class _Falling(_Schedule):
    floor: Fraction = 0.0
    """The rate at the end, as a part of the peak."""


class Linear(_Falling):
    """The rate falls in a straight line to the floor."""

    decay: Literal["linear"]
    """The schedule's name."""


class Cosine(_Falling):
    """The rate falls along half a cosine to the floor (Loshchilov and Hutter 2016, arXiv 1608.03983)."""

    decay: Literal["cosine"]
    """The schedule's name."""


class Step(_Schedule):
    """The rate is multiplied by `factor` after every `every`."""

    decay: Literal["step"]
    """The schedule's name."""
    every: SampleSpan
    """Length of one stair: a part of the run or a number of samples."""
    factor: Number = Field(default=0.1, gt=0, lt=1)
    """What the rate is multiplied by."""


class WarmupStableDecay(_Falling):
    """The rate stays at its peak, then falls linearly to the floor over `last` (Hu et al. 2024, arXiv 2404.06395)."""

    decay: Literal["warmup-stable-decay"]
    """The schedule's name."""
    last: SampleSpan = Span(0.2, "run")
    """Length of the fall: a part of the run or a number of samples."""


Schedule = Annotated[
    Annotated[Constant, Tag("constant")]
    | Annotated[Linear, Tag("linear")]
    | Annotated[Cosine, Tag("cosine")]
    | Annotated[Step, Tag("step")]
    | Annotated[WarmupStableDecay, Tag("warmup-stable-decay")],
    choice("decay", shorthand=True),
    Shorthand(),
]


class ScaleRate(Section):
    """Learning rate by batch: `lr` was found at `base_batch` and is scaled to the batch of the step."""

    rule: Literal["linear", "sqrt"]
    """linear (Goyal et al. 2017, arXiv 1706.02677) or sqrt (Krizhevsky 2014, arXiv 1404.5997)."""
    base_batch: Count
    """The batch for which `lr` is right."""


class Ramp(Section):
    """The batch grows from `start` to `train.batch` in equal stairs (Brown et al. 2020, arXiv 2005.14165)."""

    start: Count
    """The first batch."""
    over: SampleSpan
    """Until when it grows: a part of the run or a number of samples."""
    stairs: Count = 4
    """In how many stairs."""


class Clip(Section):
    """Gradient clipping: by the global norm, or by value."""

    norm: Number | None = Field(default=None, gt=0)
    """Largest norm of all gradients together."""
    value: Number | None = Field(default=None, gt=0)
    """Largest size of one element."""

    @model_validator(mode="after")
    def _one(self) -> "Clip":
        if (self.norm is None) == (self.value is None):
            found = "none of them" if self.norm is None else "both"
            raise ValueError(f"give exactly one of norm and value; found {found}")
        return self


class Sample(Section):
    """A text to continue at the end of the run, to see what was learned. Only for next-token models on text."""

    prompt: str
    """What it starts from."""
    tokens: Count = 120
    """How many tokens to add."""
    temperature: Number = Field(default=0.8, ge=0)
    """0 always takes the likeliest token."""


class Evaluate(Section):
    """Judging on the held-out samples (`data.validation`), during training and at its end."""

    every: StepInterval = Span(0.1, "run")
    """How often: a number of steps, or a part of the run."""
    batch: Count | None = None
    """Samples at once on all workers together. Default: `train.batch`. It has no effect on the result."""
    samples: Count | None = None
    """During training judge on this many samples only; the end is judged on all. Default: all."""


Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp64", "fp8", "fp8-rows", "int8"]
SHORT = ("fp8", "fp8-rows", "int8")
"""Precisions of the products of a decoder's blocks alone."""
_LENGTHS = ("tokens", "samples", "epochs", "steps")


class Train(Section):
    """The recipe. Exactly one of tokens, samples, epochs or steps says how long."""

    LENGTHS: ClassVar[tuple[str, ...]] = _LENGTHS

    task: Task | None = None
    """next-token, masked-token, classification or regression. Default: what the data is made for."""
    tokens: Count | None = None
    """Length of the run in tokens; rounded up to a whole batch."""
    samples: Count | None = None
    """Length of the run in samples; rounded up to a whole batch."""
    epochs: Number | None = Field(default=None, gt=0)
    """Length of the run in passes over the training samples; rounded up to a whole batch."""
    steps: Count | None = None
    """Length of the run in updates."""
    batch: Count
    """Samples in one update, over all workers: the only batch there is."""
    ramp: Ramp | None = None
    """Start with a smaller batch."""
    optimizer: Optimizer
    """How gradients become updates."""
    schedule: Schedule = Constant(decay="constant")
    """How the learning rate moves."""
    scale_lr: ScaleRate | None = None
    """Scale the learning rate with the batch."""
    clip: Clip | None = None
    """Gradient clipping. Default: none."""
    l1: Number = Field(default=0.0, ge=0)
    """λ of λ·Σ|w| added to the loss; on matrices only."""
    l2: Number = Field(default=0.0, ge=0)
    """λ of λ/2·Σw² added to the loss; on matrices only."""
    precision: Precision = "auto"
    """Arithmetic of forward and backward; weights and optimiser state stay fp32 (fp64 in fp64, for checking). fp8: the
    products of a decoder's blocks but the first, the rest in bf16. fp8-rows: with a scale for each row, not for each
    matrix, so that outliers do less harm, at some speed. int8: the same blocks, for GPUs without fp8."""
    compile: bool | None = None
    """Whether torch's compiler makes fused kernels of the model's blocks: quicker steps, after a first start that takes
    longer. Default: for decoders and resnets on a GPU, where the layout allows it."""
    deterministic: bool = False
    """Whether a GPU adds up in a fixed order, so that the same run gives the same bits each time, as a CPU does anyway:
    attention's fastest backward does not, and of some products, and between convolutions, the quickest kernel is taken,
    which at another start may be another one. Steps take 3 to 8% longer (H200). An operation of your own model that has
    no such order fails, by name."""
    on_nonfinite: Literal["stop", "skip", "warn"] = "stop"
    """What a NaN or infinite loss does: stop the run, skip the update, or only warn."""
    evaluate: Evaluate = Evaluate()
    """When to judge on held-out samples."""
    sample: Sample | None = None
    """Text to generate at the end."""

    @field_validator("precision", mode="before")
    @classmethod
    def _precision(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) and value.lower() in get_args(Precision) else value

    @model_validator(mode="after")
    def _check(self) -> "Train":
        given = [name for name in _LENGTHS if getattr(self, name) is not None]
        problems = []
        if len(given) != 1:
            found = f"{' and '.join(given)}: remove one or set it to null" if given else "none of them"
            problems.append(f"give exactly one of {', '.join(_LENGTHS)} as the length of the run; found {found}")
        if self.ramp and self.steps:
            problems.append("ramp needs a length in tokens, samples or epochs: with it a step has no fixed size")
        if self.ramp and self.ramp.start >= self.batch:
            problems.append(f"ramp.start ({self.ramp.start}) must be smaller than batch ({self.batch})")
        elif self.ramp and self.ramp.stairs > self.batch - self.ramp.start:
            growth = self.batch - self.ramp.start
            problems.append(f"ramp.stairs ({self.ramp.stairs}) are more than the {growth} samples the batch grows by")
        refuse(problems)
        return self
