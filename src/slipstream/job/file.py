"""Reading a job file, and saying exactly what is wrong with it: file, line, key, reason, nearest valid name."""

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from slipstream.job.base import nearest, shown
from slipstream.job.explain import CHOSEN_BY, KeyPath, explain
from slipstream.job.job import Job
from slipstream.job.machines import Machines

__all__ = ["JobError", "Problem", "check_job", "load_job", "locate", "nearest", "read_job"]


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a job: where it is and what to do."""

    where: str
    """`file:line`, or `--set`, or the file alone."""
    key: str
    message: str

    def __str__(self) -> str:
        key = "" if self.key in self.message else f"{self.key}: "
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
        self._at: dict[tuple[str, ...], str] = {}

    def add(self, path: KeyPath, node: yaml.Node) -> str:
        where = f"{self.name}:{node.start_mark.line + 1}"
        self._at[tuple(map(str, path))] = where
        return where

    def override(self, keys: Sequence[str], where: str) -> None:
        """From now on this key and all in it stand in a `--set`."""
        path = tuple(keys)
        self._at = {key: at for key, at in self._at.items() if key[: len(path)] != path} | {path: where}

    def where(self, path: KeyPath) -> str:
        """The line of the key, or of the nearest one around it."""
        keys = tuple(map(str, path))
        for end in range(len(keys), 0, -1):
            if keys[:end] in self._at:
                return self._at[keys[:end]]
        return f"{self.name}:1"


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Read a job file, apply `--set key=value` overrides, and check it all."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
        hint = f"did you mean {near[0]}?" if near else "`slipstream init` writes one"
        raise JobError([Problem(str(path), "", f"there is no such file; {hint}")]) from None
    except UnicodeDecodeError:
        raise JobError([Problem(str(path), "", "is not a text file; a job file is YAML in UTF-8")]) from None
    except OSError as error:
        raise JobError([Problem(str(path), "", f"cannot be read: {error.strerror}")]) from None
    return read_job(text, name=str(path), overrides=overrides)


def read_job(text: str, name: str = "job", overrides: Sequence[str] = ()) -> Job:
    """Read a job from YAML text."""
    lines = _Lines(name)
    values, problems = _parse(text, lines)
    for override in overrides:
        problems += _apply(values, override, lines)
    return _check(values, problems, lines.where)


def locate(error: JobError, path: str | Path, overrides: Sequence[str] = ()) -> JobError:
    """The same problems of a job that was read from this file, each with the line of the first key that it names.

    For what shows only after reading, when the machine, the data or the model is there.
    """
    lines = _Lines(str(path))
    values, _ = _parse(Path(path).read_text(encoding="utf-8"), lines)
    for override in overrides:
        _apply(values, override, lines)

    def place(problem: Problem) -> Problem:
        words = (problem.key or word for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", problem.message))
        key = next((word for word in words if word.split(".")[0] in Job.model_fields), "")
        return Problem(lines.where(tuple(key.split("."))) if key else str(path), key, problem.message)

    return JobError([place(problem) for problem in error.problems])


def check_job(values: dict[str, Any]) -> Job:
    """A job from plain values, as a program writes them."""
    return _check(values, [], lambda _: "job")


def check_machines(overrides: Sequence[str]) -> Machines:
    """What `--set machines.…=…` says where there is no job file."""
    lines, values, problems = _Lines("--set"), dict[str, Any](), list[Problem]()
    for override in overrides:
        if not override.startswith("machines."):
            problems.append(
                Problem(f"--set {override}", "", "a program has no job file: only machines.… has an effect")
            )
        problems += _apply(values, override, lines)
    try:
        machines = Machines.model_validate(values.get("machines", {}))
    except ValidationError as error:
        found = explain(error, Machines, values["machines"])
        problems += [
            Problem(lines.where(("machines", *path)), _dotted(("machines", *path)), text) for path, text in found
        ]
    if problems:
        raise JobError(problems)
    return machines


def _check(values: dict[str, Any], problems: list[Problem], where: Callable[[KeyPath], str]) -> Job:
    try:
        job = Job.model_validate(values)
    except ValidationError as error:
        problems += [Problem(where(path), _dotted(path), text) for path, text in explain(error, Job, values)]
    if problems:
        raise JobError(problems)
    return job


def _parse(text: str, lines: _Lines) -> tuple[dict[str, Any], list[Problem]]:
    try:
        problems = list(_walk(yaml.compose(text, Loader=yaml.SafeLoader), (), lines))
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        raise JobError([_not_yaml(error, lines.name)]) from None
    except RecursionError:
        raise JobError([Problem(lines.name, "", "is nested too deeply; perhaps an alias stands in itself")]) from None
    except (yaml.YAMLError, ValueError) as error:  # a character or a date that cannot be
        reason = str(error).splitlines()[0]
        raise JobError([Problem(lines.name, "", f"is not valid YAML: {reason}")]) from None
    if not isinstance(values, dict):
        found = "it is empty" if values is None else f"it holds {shown(values)}"
        raise JobError([Problem(f"{lines.name}:1", "", f"a job file is a mapping that starts with name: …; {found}")])
    return values, problems


def _not_yaml(error: yaml.MarkedYAMLError, name: str) -> Problem:
    mark, start = error.problem_mark or error.context_mark, error.context_mark
    line = mark.line + 1 if mark else 1
    since = f"{error.context} that starts on line {start.line + 1}, " if start and start.line + 1 != line else ""
    tabs = "; indent with spaces, not tabs" if "\\t" in str(error.problem) else ""
    return Problem(f"{name}:{line}", "", f"is not valid YAML: {since}{error.problem}{tabs}")


def _walk(node: yaml.Node | None, path: KeyPath, lines: _Lines) -> Iterator[Problem]:
    """Note the line of every key; yield those that are written twice."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            where = lines.add((*path, name), key)
            if name in seen:
                yield Problem(where, _dotted((*path, name)), "is written twice; keep one")
            seen.add(name)
            yield from _walk(value, (*path, name), lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines.add((*path, index), value)
            yield from _walk(value, (*path, index), lines)


_SHORT = ("train.optimizer", "train.task", "train.schedule", "exchange.codec")
"""What may be written as a name alone."""


def _apply(values: dict[str, Any], override: str, lines: _Lines) -> list[Problem]:
    """`--set train.batch=64`: the value is YAML."""
    key, equals, text = override.partition("=")
    keys = key.strip().split(".")
    where = f"--set {override}"
    if not equals or not all(keys):
        return [Problem(where, "", "write it as key=value, for example train.batch=64")]
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return [Problem(where, ".".join(keys), f"the value {text!r} is not valid YAML")]
    target = values
    for depth, part in enumerate(keys[:-1], start=1):
        if isinstance(target.get(part), str) and ".".join(keys[:depth]) in _SHORT:
            target[part] = {CHOSEN_BY[part]: target[part]}
        if not isinstance(target.get(part), dict):
            target[part] = {}
            lines.override(keys[:depth], where)
        target = target[part]
    target[keys[-1]] = value
    lines.override(keys, where)
    return []


def _dotted(path: KeyPath) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
