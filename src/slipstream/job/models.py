"""`model:` what is trained. Built-in models, the user's own by import, and Hugging Face models."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Tag, WithJsonSchema, field_validator, model_validator
from pydantic.config import JsonDict

from slipstream.job.base import Section, choice, nearest, refuse, shown
from slipstream.job.data import absolute
from slipstream.job.units import Count, Fraction, Number

_ROPE_THETA = 10000.0
# The published shapes: GPT-2 (Radford et al. 2019), Llama 3.1 and 3.2 (Grattafiori et al. 2024, arXiv 2407.21783).
_GPT2: dict[str, Any] = {
    "positions": "learned", "norm": "layer", "activation": "gelu", "bias": True, "tied": True,
    "vocabulary": 50257, "context": 1024,
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "positions": "rotary", "norm": "rms", "activation": "swiglu", "bias": False, "tied": False, "kv_heads": 8,
    "vocabulary": 128256, "context": 131072, "rope_theta": 500000.0,
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-124m": {**_GPT2, "layers": 12, "hidden": 768, "heads": 12},
    "gpt2-1.5b": {**_GPT2, "layers": 48, "hidden": 1600, "heads": 25},
    "llama-1b": {**_LLAMA, "layers": 16, "hidden": 2048, "heads": 32, "feed_forward": 8192, "tied": True},
    "llama-8b": {**_LLAMA, "layers": 32, "hidden": 4096, "heads": 32, "feed_forward": 14336},
    "llama-70b": {**_LLAMA, "layers": 80, "hidden": 8192, "heads": 64, "feed_forward": 28672},
    "llama-405b": {**_LLAMA, "layers": 126, "hidden": 16384, "heads": 128, "feed_forward": 53248},
}


_REQUIRED: JsonDict = {
    "required": ["kind"],
    "anyOf": [{"required": ["preset"]}, {"required": ["layers", "hidden", "heads"]}],
}


class DecoderModel(Section):
    """A decoder-only transformer, covering the GPT-2 and Llama families."""

    model_config = ConfigDict(json_schema_extra=_REQUIRED)

    kind: Literal["decoder"] = "decoder"
    """The model's name in the table of models."""
    preset: Annotated[str, WithJsonSchema({"enum": list(PRESETS)})] | None = None
    """A published shape: gpt2-124m, gpt2-1.5b, llama-1b, llama-8b, llama-70b, llama-405b. Other keys override it."""
    layers: Count
    """Number of transformer blocks."""
    hidden: Count
    """Width of the residual stream."""
    heads: Count
    """Query heads; they divide `hidden`."""
    kv_heads: Count | None = None
    """Key and value heads, shared by groups of query heads. Default: as many as `heads`."""
    feed_forward: Count | None = None
    """Inner width of the feed-forward part. Default: 4 × hidden for gelu, 8/3 × hidden (up to 64s) for swiglu."""
    vocabulary: Count | None = None
    """Number of token ids. Default: what the tokeniser of the data has."""
    context: Count | None = None
    """Longest sequence the model can take. Default: `data.sequence`."""
    positions: Literal["rotary", "learned"] = "rotary"
    """How positions enter: rotary (Llama) or a learned table (GPT-2)."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm (Llama) or LayerNorm (GPT-2)."""
    norm_eps: Number = Field(default=1e-5, gt=0)
    """Added to the variance before the root is taken."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Feed-forward part: SwiGLU (Llama) or GELU (GPT-2)."""
    bias: bool = False
    """Biases on the linear layers."""
    tied: bool = True
    """Input embedding and output head share their weights."""
    rope_theta: Number = Field(default=_ROPE_THETA, gt=0)
    """Base of the rotary frequencies; only with rotary positions."""
    dropout: Fraction = Field(default=0.0, lt=1)
    """Dropout on the embedding and on what each block adds. Masks belong to samples, not to workers."""

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("preset") is None:
            return value
        name = value["preset"]
        if not isinstance(name, str) or name not in PRESETS:
            hint = nearest(str(name), list(PRESETS))
            raise ValueError(f"preset {shown(name)} is not known{hint}; presets are {', '.join(PRESETS)}")
        expanded = {**PRESETS[name], **value}
        if expanded["positions"] == "learned" and "rope_theta" not in value:
            expanded.pop("rope_theta", None)
        return expanded

    @model_validator(mode="after")
    def _check(self) -> "DecoderModel":
        size, problems = self.hidden // self.heads, []
        if self.hidden % self.heads:
            problems.append(f"heads ({self.heads}) must divide hidden ({self.hidden})")
        elif self.positions == "rotary" and size % 2:
            problems.append(f"heads ({self.heads}) give a head size of {size}; rotary positions need an even one")
        if self.kv_heads and self.heads % self.kv_heads:
            problems.append(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
        if self.positions == "learned" and self.rope_theta != _ROPE_THETA:
            problems.append("rope_theta has no effect with learned positions; remove it or use positions: rotary")
        refuse(problems)
        return self

    @property
    def inner(self) -> int:
        """Width of the feed-forward part."""
        if self.feed_forward:
            return self.feed_forward
        return 4 * self.hidden if self.activation == "gelu" else -(-8 * self.hidden // 3 // 64) * 64


class ResnetModel(Section):
    """A residual network for images (He et al. 2015, arXiv 1512.03385)."""

    kind: Literal["resnet"]
    """The model's name in the table of models."""
    depth: Literal[18, 50] = 18
    """18 (basic blocks) or 50 (bottlenecks)."""
    width: Count = 64
    """Channels of the first stage; the published networks have 64."""
    stem: Literal["imagenet", "small"] = "imagenet"
    """First layer: 7×7 with pooling for large images, 3×3 for small ones (under about 64 pixels)."""
    norm: Literal["batch", "group"] = "batch"
    """Batch norm, synchronised across workers; or group norm, which also admits micro-batches."""


class MlpModel(Section):
    """A multi-layer perceptron over flattened inputs."""

    kind: Literal["mlp"]
    """The model's name in the table of models."""
    hidden: tuple[Count, ...] = (256, 256)
    """Width of each hidden layer."""
    activation: Literal["relu", "gelu", "tanh"] = "relu"
    """Between the layers."""
    dropout: Fraction = Field(default=0.0, lt=1)
    """Dropout after each hidden layer. Masks belong to samples, not to workers."""


class LinearModel(Section):
    """One linear layer: linear or logistic regression."""

    kind: Literal["linear"]
    """The model's name in the table of models."""


class Split(Section):
    """How the user's own model may be split: the modules that its forward passes through one after the other, and what
    may be shared out inside them. Names are those of `named_modules`; `*` stands for one part of a name."""

    before: tuple[str, ...] = ()
    """Modules before the blocks, in the order of forward: `[embed]`."""
    blocks: str | None = None
    """The `nn.ModuleList` or `nn.Sequential` of blocks, each taking what the one before it gave: `layers`."""
    after: tuple[str, ...] = ()
    """Modules after the blocks, in the order of forward: `[norm, head]`."""
    tensor: dict[str, Literal["column", "row"]] = Field(default_factory=dict)
    """Linear layers that tensor workers share out: `column` by outputs, then `row` by inputs: `{up: column}`."""


class ImportModel(Section):
    """The user's own `nn.Module`, built by a function or class of theirs."""

    kind: Literal["import"] = Field(default="import", exclude=True)
    """Said by the key `import` itself."""
    target: str = Field(alias="import", pattern=r"^[\w.]+:[\w.]+$")
    """`package.module:name` of a class or function that returns the model."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for it."""
    split: Split | None = None
    """How it may be split over workers by `layout.tensor` and `layout.pipeline`, and recomputed."""


class HuggingFaceModel(Section):
    """A Hugging Face model: a local folder to start from, or a configuration to start fresh. Needs the extra [hf]."""

    kind: Literal["huggingface"] = Field(default="huggingface", exclude=True)
    """Said by the key `huggingface` itself."""
    source: str | dict[str, Any] = Field(alias="huggingface")
    """A local folder with config.json (and weights), or a configuration with `model_type` in it."""

    @field_validator("source", mode="before")
    @classmethod
    def _checked_source(cls, value: Any) -> Any:
        if isinstance(value, str):
            return absolute(value)
        if not isinstance(value, dict) or "model_type" not in value:
            example = "{model_type: bert, hidden_size: 128}"
            raise ValueError(f"needs a local folder, or a configuration with a model_type, for example {example}")
        return value


Model = Annotated[
    Annotated[DecoderModel, Tag("decoder")]
    | Annotated[ResnetModel, Tag("resnet")]
    | Annotated[MlpModel, Tag("mlp")]
    | Annotated[LinearModel, Tag("linear")]
    | Annotated[ImportModel, Tag("import")]
    | Annotated[HuggingFaceModel, Tag("huggingface")],
    choice("kind", special=("import", "huggingface"), implied={"preset": "decoder"}),
]
