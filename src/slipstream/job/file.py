"""Reading a job file, and saying exactly what is wrong with it: file, line, key, reason, nearest valid name."""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from slipstream.job.data import BUILT_IN_SOURCES
from slipstream.job.job import Job


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a job: where it is and what to do."""

    where: str
    """`file:line`, or `--set`, or the file alone."""
    key: str
    message: str

    def __str__(self) -> str:
        key = f"{self.key}: " if self.key else ""
        return f"{self.where}: {key}{self.message}"


class JobError(ValueError):
    """The job file cannot be used. Nothing has been written."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class _Lines:
    """Where each key of a YAML file stands."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.at: dict[tuple[str | int, ...], str] = {}

    def add(self, path: tuple[str | int, ...], node: yaml.Node) -> None:
        self.at[path] = f"{self.name}:{node.start_mark.line + 1}"

    def where(self, path: tuple[str | int, ...]) -> str:
        """The line of the key, or of the nearest one around it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.at:
                return self.at[path[:end]]
        return self.name


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Read a job file, apply `--set key=value` overrides, and check it all."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
        hint = f"did you mean {near[0]}?" if near else "`slipstream init` writes one"
        raise JobError([Problem(str(path), "", f"there is no such file; {hint}")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise JobError([Problem(str(path), "", f"cannot be read as text: {error}")]) from None
    return read_job(text, name=str(path), overrides=overrides)


def read_job(text: str, name: str = "job", overrides: Sequence[str] = ()) -> Job:
    """Read a job from YAML text."""
    lines = _Lines(name)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _walk(node, (), lines)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise JobError([Problem(where, "", f"is not valid YAML: {error.problem}")]) from None
    except yaml.YAMLError as error:
        raise JobError([Problem(name, "", f"is not valid YAML: {error}")]) from None
    if not isinstance(values, dict):
        found = "it is empty" if values is None else f"it holds a {type(values).__name__}"
        raise JobError([Problem(name, "", f"a job file is a mapping that starts with name: …; {found}")])
    for override in overrides:
        _apply(values, override, lines)
    try:
        return Job.model_validate(values)
    except ValidationError as error:
        raise JobError([_problem(detail, values, lines) for detail in error.errors()]) from None


def _walk(node: yaml.Node | None, path: tuple[str | int, ...], lines: _Lines) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                where = f"{lines.name}:{key.start_mark.line + 1}"
                raise JobError([Problem(where, _dotted((*path, key.value)), "is written twice; keep one")])
            seen.add(key.value)
            lines.add((*path, key.value), key)
            _walk(value, (*path, key.value), lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines.add((*path, index), value)
            _walk(value, (*path, index), lines)


def _apply(values: dict[str, Any], override: str, lines: _Lines) -> None:
    """`--set train.batch=64`: the value is YAML."""
    key, equals, text = override.partition("=")
    keys = key.strip().split(".")
    where = f"--set {override}"
    if not equals or not all(keys):
        raise JobError([Problem(where, "", "write it as key=value, for example train.batch=64")])
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise JobError([Problem(where, "", f"the value {text!r} is not valid YAML")]) from None
    target = values
    for part in keys[:-1]:
        if not isinstance(target.get(part), dict):
            target[part] = {}
        target = target[part]
    target[keys[-1]] = value
    lines.at[tuple(keys)] = where


def _problem(detail: ErrorDetails, values: dict[str, Any], lines: _Lines) -> Problem:
    section, path = _locate(detail["loc"], values)
    message = _message(detail, section, path)
    if detail["type"] == "union_tag_invalid" and isinstance(detail["input"], dict):
        path = (*path, _CHOSEN_BY[str(path[-1])])
    if not path and (named := _NAMED_KEY.match(message)):  # a rule over several sections names its key itself
        return Problem(lines.where(tuple(named[0].split("."))), "", message)
    return Problem(lines.where(path), _dotted(path), message)


def _locate(loc: tuple[str | int, ...], values: Any) -> tuple[type[BaseModel], tuple[str | int, ...]]:
    """The section an error is in, and the key path as the user wrote it (pydantic adds the tags of unions)."""
    section: type[BaseModel] = Job
    members: list[type[BaseModel]] = []
    path: list[str | int] = []
    for part in loc:
        chosen = next((member for member in members if part in _tags(member)), None)
        if chosen and not (isinstance(values, dict) and part in values and part in _fields(chosen)):
            section, members = chosen, []
            continue
        if chosen:
            section = chosen
        path.append(part)
        members = list(_sections(_fields(section).get(str(part))))
        if len(members) == 1:
            section, members = members[0], []
        values = values.get(part) if isinstance(values, dict) else None
    return section, tuple(path)


def _fields(section: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _sections(field: Any) -> Iterator[type[BaseModel]]:
    if field is None:
        return
    pending = [field.annotation, *field.metadata]
    while pending:
        kind = pending.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield kind
        elif get_origin(kind) is not None:
            pending.extend(get_args(kind))


def _tags(section: type[BaseModel]) -> set[Any]:
    """The names by which a section is chosen: the values of its kind, name or decay; its special key; its role."""
    names: set[Any] = {section.__name__.removesuffix("Data").lower()}
    for key in ("kind", "name", "decay"):
        if key in section.model_fields:
            names |= set(get_args(section.model_fields[key].annotation))
    return names


def _message(detail: ErrorDetails, section: type[BaseModel], path: tuple[str | int, ...]) -> str:
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "extra_forbidden":
        valid = [name for name, field in _fields(section).items() if not field.exclude]
        return f"unknown key{nearest(str(path[-1]), valid)}; valid keys here: {', '.join(valid)}"
    if kind == "missing":
        return f"is missing{_description(section, path)}"
    if kind in ("literal_error", "union_tag_invalid"):
        expected = context.get("expected") or context.get("expected_tags", "")
        valid = [part.strip(" '\"") for part in str(expected).replace(" or ", ", ").split(",")]
        shown = context.get("tag", value)
        if path[-1:] == ("data",):
            valid = [*BUILT_IN_SOURCES, "a path ending in .txt, .jsonl, .csv, .parquet or .npy", "a folder/"]
            return f"unknown source {shown!r}{nearest(str(shown), list(BUILT_IN_SOURCES))}; sources: {', '.join(valid)}"
        return f"{shown!r} is not a valid choice{nearest(str(shown), valid)}; valid: {', '.join(valid)}"
    if kind == "union_tag_not_found":
        return _CHOOSERS.get(str(path[-1]), "does not say which kind it is")
    if kind == "value_error":
        return str(context.get("error", detail["msg"])).removeprefix("Value error, ")
    if kind == "string_pattern_mismatch":
        return f"{value!r} has the wrong form{_description(section, path)}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"needs a mapping with keys, not {value!r}"
    return f"{detail['msg'][0].lower()}{detail['msg'][1:]}, not {value!r}"


_NAMED_KEY = re.compile(r"^[a-z_0-9]+(\.[a-z_0-9]+)+")
_CHOSEN_BY = {"model": "kind", "data": "source", "optimizer": "name", "task": "kind", "schedule": "decay"}
_CHOOSERS = {
    "model": "needs kind: decoder, resnet, mlp or linear; or import: package.module:name; or huggingface: folder",
    "data": f"needs source: {', '.join(BUILT_IN_SOURCES)} or a path; or import: package.module:name",
    "optimizer": "needs name: sgd, momentum, nesterov, adam, adamw, lars or lamb",
    "task": "needs kind: next-token, masked-token, classification or regression",
    "schedule": "needs decay: constant, linear, cosine, step or warmup-stable-decay",
}


def nearest(word: str, valid: list[str]) -> str:
    near = difflib.get_close_matches(word.lower(), valid, n=1, cutoff=0.55)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _description(section: type[BaseModel], path: tuple[str | int, ...]) -> str:
    field = _fields(section).get(str(path[-1])) if path else None
    return f": {field.description}" if field is not None and field.description else ""


def _dotted(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
