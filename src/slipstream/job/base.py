"""What all sections of the job file share."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Discriminator


class Section(BaseModel):
    """A part of the job file. Immutable; an unknown key is an error; a field's docstring is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, populate_by_name=True)


def choice(key: str, *, special: tuple[str, ...] = (), shorthand: bool = False) -> Discriminator:
    """Choose a section by the value of `key`, or by the presence of one of the `special` keys.

    With `shorthand` a plain string stands for a section with only that choice in it.
    """
    return Discriminator(_chooser(key, special, shorthand))


def _chooser(key: str, special: tuple[str, ...], shorthand: bool) -> Callable[[Any], str | None]:
    def choose(value: Any) -> str | None:
        if isinstance(value, dict):
            found = next((name for name in special if name in value), None)
            return found or value.get(key)
        if isinstance(value, BaseModel):
            tag = getattr(value, key, None)
            return tag if isinstance(tag, str) else None
        return value if shorthand and isinstance(value, str) else None

    return choose
