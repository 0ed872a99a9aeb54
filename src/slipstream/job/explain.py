"""What is wrong with a job's values, in plain words: the key as the user wrote it, the reason, what to do."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Annotated, Any, get_args, get_origin

from pydantic import Tag, ValidationError
from pydantic_core import ErrorDetails

from slipstream.job.base import Section, nearest, shown
from slipstream.job.data import BUILT_IN_SOURCES, SUFFIXES

KeyPath = tuple[str | int, ...]

CHOSEN_BY = {
    "model": "kind",
    "data": "source",
    "optimizer": "name",
    "task": "kind",
    "schedule": "decay",
    "codec": "name",
    "exchange": "kind",
}
_CHOOSERS = {
    "model": "needs kind: decoder, resnet, mlp or linear; or import: package.module:name; or huggingface: folder",
    "data": f"needs source: {', '.join(BUILT_IN_SOURCES)} or a path; or import: package.module:name",
    "optimizer": "needs name: sgd, momentum, nesterov, adam, adamw, lars or lamb",
    "task": "needs kind: next-token, masked-token, classification or regression",
    "schedule": "needs decay: constant, linear, cosine, step or warmup-stable-decay",
    "exchange": "may have kind: allreduce, local or server",
    "codec": "needs name: fp16, bf16, int8, onebit, topk, randomk or powersgd",
}
_TEXTS = {
    "string_type": "needs text, not {value}",
    "bool_type": "needs true or false, not {value}",
    "bool_parsing": "needs true or false, not {value}",
    "tuple_type": "needs a list such as [a, b], not {value}",
    "too_short": "needs at least {min_length} values, not {actual_length}",
    "too_long": "needs at most {max_length} values, not {actual_length}",
    "greater_than": "must be greater than {gt:g}, not {value}",
    "greater_than_equal": "must be at least {ge:g}, not {value}",
    "less_than": "must be less than {lt:g}, not {value}",
    "less_than_equal": "must be at most {le:g}, not {value}",
    "model_type": "needs a mapping with keys, not {value}",
    "dict_type": "needs a mapping with keys, not {value}",
    "invalid_key": "a key is text, not {value}; put it in quotes",
}


@dataclass
class _Place:
    """Where in the job an error is."""

    section: type[Section] | None
    """The section that the last key of the path stands for; None for a plain value."""
    path: list[str | int] = field(default_factory=list)
    """The keys as the user wrote them."""
    holder: type[Section] | None = None
    """The section that has the last key."""
    others: dict[str, type[Section]] = field(default_factory=dict)
    """The sections that could have been chosen instead of the holder."""


def explain(error: ValidationError, job: type[Section], values: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """All that is wrong: the path of a key and the reason."""
    for detail in error.errors():
        place = _locate(detail["loc"], job, values)
        if detail["type"] == "value_error":  # from us, a line for each problem
            for line in str(detail["ctx"]["error"]).splitlines():
                yield (*place.path, *_named_key(line, place.section)), line
        elif detail["type"].startswith("union_tag"):
            yield _wrong_choice(detail, place)
        else:
            yield tuple(place.path), _message(detail, place)


def _locate(loc: KeyPath, job: type[Section], values: Any) -> _Place:
    """Follow a location through the sections, leaving out the tags and type names that pydantic puts in."""
    place = _Place(job)
    choices: dict[str, type[Section]] = {}
    siblings: dict[str, type[Section]] = {}
    for part in loc:
        if choices:
            place.section, siblings, choices = choices[str(part)], choices, {}
            continue
        if place.section is None and isinstance(part, str) and not (isinstance(values, dict) and part in values):
            continue
        place.path.append(part)
        place.holder, place.others, siblings = place.section, siblings, {}
        setting = _fields(place.holder).get(str(part))
        choices = dict(_choices(setting.annotation)) if setting else {}
        place.section = choices.popitem()[1] if len(choices) == 1 else None
        values = values.get(part) if isinstance(values, dict) else None
    return place


def _fields(section: type[Section] | None) -> dict[str, Any]:
    return {setting.alias or name: setting for name, setting in section.model_fields.items()} if section else {}


def _choices(kind: Any, tag: str = "") -> Iterator[tuple[str, type[Section]]]:
    """The sections that a field admits, by their tags."""
    if isinstance(kind, type) and issubclass(kind, Section):
        yield tag, kind
    elif get_origin(kind) is Annotated:
        inner, *notes = get_args(kind)
        yield from _choices(inner, next((note.tag for note in notes if isinstance(note, Tag)), ""))
    else:
        for inner in get_args(kind):
            yield from _choices(inner)


def _named_key(line: str, section: type[Section] | None) -> list[str]:
    """The key that the text of a rule over several keys starts with."""
    match = re.match(r"[a-z_0-9]+(\.[a-z_0-9]+)*", line)
    keys = match[0].split(".") if match else [""]
    return keys if keys[0] in _fields(section) else []


def _wrong_choice(detail: ErrorDetails, place: _Place) -> tuple[KeyPath, str]:
    """A section is chosen by a wrong name, or by none."""
    setting, value = str(place.path[-1]), detail["input"]
    key, written = CHOSEN_BY[setting], value if isinstance(value, dict) else {}
    path = (*place.path, key) if key in written else tuple(place.path)
    if detail["type"] == "union_tag_not_found":
        needs = "" if isinstance(value, dict) else f"needs a mapping with keys, not {shown(value)}; it "
        return path, needs + _CHOOSERS[setting]
    if setting == "data":
        return path, _unknown_source(value["source"])
    if setting == "codec" and value == "none":
        return path, "to have none, leave it out"
    return path, _not_valid(written.get(key, value), detail["ctx"]["expected_tags"])


def _unknown_source(source: str) -> str:
    hint = nearest(source, BUILT_IN_SOURCES) or nearest(PurePath(source).suffix, list(SUFFIXES))
    paths = f"a path ending in {', '.join(SUFFIXES)}, a folder/"
    return f"unknown source {shown(source)}{hint}; sources: {', '.join(BUILT_IN_SOURCES)}, {paths}"


def _message(detail: ErrorDetails, place: _Place) -> str:
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "extra_forbidden":
        return _unknown_key(str(place.path[-1]), place)
    if kind == "missing":
        return f"is missing{_description(place)}"
    if kind == "literal_error":
        return _not_valid(value, context["expected"])
    if kind == "string_pattern_mismatch":
        return f"{shown(value)} has the wrong form{_description(place)}"
    if kind == "string_type" and not isinstance(value, (dict, list, type(None))):
        return f"needs text, not {shown(value)}; put it in quotes"
    if kind in _TEXTS:
        return _TEXTS[kind].format(value=shown(value), **context)
    return f"{detail['msg'].replace('Input should', 'must')}, not {shown(value)}"


def _unknown_key(key: str, place: _Place) -> str:
    valid = [name for name, setting in _fields(place.holder).items() if not setting.exclude]
    owners = [tag for tag, section in place.others.items() if key in _fields(section)]
    hint = f" here; it belongs to {', '.join(owners)}{_chooser(place)}" if owners else nearest(key, valid)
    return f"unknown key{hint}; valid keys here: {', '.join(valid)}"


def _chooser(place: _Place) -> str:
    """Of the one section whose kind need not be written."""
    return " (set kind)" if place.path[:-1] == ["exchange"] else ""


def _not_valid(value: Any, expected: str) -> str:
    valid = [part.strip(" '").replace("True", "true") for part in expected.replace(" or ", ", ").split(",")]
    hint = " in quotes" if value in valid else nearest(str(value), valid)
    return f"{shown(value)} is not a valid choice{hint}; valid: {', '.join(valid)}"


def _description(place: _Place) -> str:
    text = place.holder.descriptions().get(str(place.path[-1])) if place.holder else None
    return f": {text}" if text else ""
