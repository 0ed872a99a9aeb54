"""What all sections of the job file share."""

import ast
import difflib
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Discriminator, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema


class Section(BaseModel):
    """A part of the job file. Immutable; an unknown key is an error; a field's docstring is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, ser_json_inf_nan="constants")

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """What is written below each field, by its key. Read when asked for: pydantic's own way of doing it would add
        0.2 s to every start."""
        found: dict[str, str] = {}
        for part in (part for part in reversed(cls.__mro__) if issubclass(part, Section) and part is not Section):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
            assert isinstance(definition, ast.ClassDef)
            for field, below in pairwise(definition.body):
                name = ast.unparse(field.target) if isinstance(field, ast.AnnAssign) else ""
                if name in cls.model_fields and isinstance(below, ast.Expr):
                    found[cls.model_fields[name].alias or name] = inspect.cleandoc(ast.literal_eval(below.value))
        return found

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        written = handler(core_schema)
        properties = handler.resolve_ref_schema(written).get("properties", {})
        defaults = cls.model_construct().model_dump(mode="json", by_alias=True, warnings=False)
        for key, text in cls.descriptions().items():
            if key in properties:  # one that its own key says is not
                properties[key]["description"] = text
            if "default" in properties.get(key, ()) and key in defaults:
                properties[key]["default"] = defaults[key]  # as a job file has it: 5%, 120s
        return written


class Named(Section):
    """A section that may be written as the name alone, which is the value of the key that chooses it."""

    key: ClassVar[str] = "name"

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {cls.key: value} if isinstance(value, str) else value


def choice(
    key: str,
    *,
    special: tuple[str, ...] = (),
    implied: Mapping[str, str] | None = None,
    shorthand: bool = False,
    default: str | None = None,
) -> Discriminator:
    """Choose a section by the value of `key`, or by the presence of one of the `special` keys, or of one that only one
    section has and so implies it.

    With `shorthand` a plain string stands for a section with only that choice in it; `default` is chosen where nothing
    says otherwise.
    """
    return Discriminator(_chooser(key, special, implied or {}, shorthand, default))


def _chooser(
    key: str, special: tuple[str, ...], implied: Mapping[str, str], shorthand: bool, default: str | None
) -> Callable[[Any], str | None]:
    def choose(value: Any) -> str | None:
        if isinstance(value, dict):
            found = next((name for name in special if name in value), None)
            meant = next((section for name, section in implied.items() if name in value), default)
            return found or value.get(key, meant)
        if isinstance(value, BaseModel):
            tag = getattr(value, key, None)
            return tag if isinstance(tag, str) else None
        return value if shorthand and isinstance(value, str) else None

    return choose


class Shorthand:
    """Tells the JSON schema that a choice may also be written as its name alone."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        assert core_schema["type"] == "tagged-union", "stands after a choice"
        return {"anyOf": [{"enum": list(core_schema["choices"])}, handler(core_schema)]}


def refuse(problems: Sequence[str]) -> None:
    """Refuse a section for all that is wrong with it, one line for each; a line starts with its key if it has one."""
    if problems:
        raise ValueError("\n".join(problems))


def nearest(word: str, valid: Sequence[str]) -> str:
    """A hint at the valid name that a wrong one was probably meant to be."""
    near = difflib.get_close_matches(word.lower(), valid, n=1, cutoff=0.55)
    return f" (did you mean {near[0]!r}?)" if near else ""


def shown(value: Any) -> str:
    """A value as an error text shows it: as YAML writes it, and not too long."""
    if value is None:
        return "an empty value"
    text = str(value).lower() if isinstance(value, bool) else repr(value).removesuffix(".0")
    return text if len(text) <= 60 else f"{text[:57]}..."
