"""Rows of numbers: .csv, .parquet, or a pair of .npy files."""

import csv
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.data.arrays import Arrays, load_array
from slipstream.data.base import Dataset
from slipstream.data.checks import existing_file, nearest, need_extra
from slipstream.job import Job
from slipstream.job.data import TableData


def check_table(data: TableData) -> None:
    existing_file(data.source, "data.source")
    if data.source.endswith(".npy"):
        existing_file(data.target, "data.target")
    if data.source.endswith(".parquet"):
        need_extra("pyarrow", "pyarrow", "parquet", f"data.source {data.source}")


def open_table(data: TableData, job: Job) -> Dataset:
    check_table(data)
    read = {".csv": _read_csv, ".parquet": _read_parquet, ".npy": _read_npy}[Path(data.source).suffix]
    inputs, targets = read(data)
    if len(inputs) != len(targets):
        raise ValueError(
            f"data.target: {data.target} has {len(targets):,} rows, but {data.source} has {len(inputs):,}; "
            "there must be one target for each row of inputs"
        )
    if not len(inputs):
        raise ValueError(f"data.source: {data.source} has no rows")
    if job.task.kind == "classification":
        classes = _classes(targets, data)
        return Arrays(inputs, classes, outputs=int(classes.max()) + 1)
    if job.task.kind == "regression":
        numbers = targets.reshape(len(targets), -1).astype(np.float32)
        return Arrays(inputs, numbers, outputs=numbers.shape[1])
    raise ValueError(f"train.task {job.task.kind} needs tokens; data.source {data.source} holds rows of numbers")


def _read_csv(data: TableData) -> tuple[np.ndarray, np.ndarray]:
    try:
        with Path(data.source).open(encoding="utf-8-sig", newline="") as file:
            return _parse_csv(data, csv.reader(file))
    except UnicodeDecodeError as error:
        raise ValueError(f"data.source: {data.source} is not UTF-8 text ({error.reason}); convert it") from None


def _parse_csv(data: TableData, rows: Any) -> tuple[np.ndarray, np.ndarray]:
    header = [name.strip() for name in next(rows, [])]
    names = _columns(data, header)
    places = [(header.index(name), name) for name in names]
    values = array("d")
    for row in rows:
        if row:  # a blank line is no row
            where = f"{data.source}:{rows.line_num}"
            if len(row) != len(header):
                raise ValueError(f"{where}: has {len(row)} values, but the header names {len(header)} columns")
            values.extend(
                _number(row[place], f"{where}: column {name!r}", name == data.target) for place, name in places
            )
    return _inputs_and_target(np.frombuffer(values).reshape(-1, len(names)), data, names)


def _number(text: str, where: str, is_target: bool) -> float:
    try:
        return float(text)
    except ValueError:
        found = f"{text!r} is not a number" if text.strip() else "there is no value"
        advice = "number the classes from 0" if is_target else "correct it, or leave the column out with data.inputs"
        raise ValueError(f"{where}: {found}; {advice}") from None


def _read_parquet(data: TableData) -> tuple[np.ndarray, np.ndarray]:
    import pyarrow
    from pyarrow import parquet

    path = Path(data.source)
    try:
        names = _columns(data, parquet.read_schema(path).names)
        table = parquet.read_table(path, columns=names)
    except pyarrow.ArrowException as error:
        raise ValueError(f"data.source: {path} cannot be read as parquet: {error}") from None
    for name in names:
        kind, types = table.schema.field(name).type, pyarrow.types
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
            raise ValueError(f"{path}: column {name!r} holds {kind}, not numbers; leave it out with data.inputs")
    columns = [table.column(name).to_numpy().astype(np.float64) for name in names]
    return _inputs_and_target(np.stack(columns, axis=1), data, names)


def _read_npy(data: TableData) -> tuple[np.ndarray, np.ndarray]:
    inputs = load_array(Path(data.source), "data.source")
    targets = load_array(Path(data.target), "data.target")
    if not inputs.ndim or not targets.ndim:
        raise ValueError(f"data.source: {data.source} and {data.target} must have a first dimension of rows")
    return (inputs[:, None] if inputs.ndim == 1 else inputs), targets


def _columns(data: TableData, header: Sequence[str]) -> list[str]:
    """The columns to read, the target last."""
    name, count = next(iter(Counter(header).most_common(1)), ("", 0))
    if count > 1:
        raise ValueError(f"{data.source}: {count} columns are named {name!r}; rename them")
    inputs = data.inputs or [name for name in header if name != data.target]
    for setting, name in [("data.target", data.target), *(("data.inputs", name) for name in inputs)]:
        if name not in header:
            hint = nearest(name, header) or f"; it has {', '.join(header)}"
            raise ValueError(f"{setting}: there is no column {name!r} in {data.source}{hint}")
    if not inputs:
        raise ValueError(f"{data.source}: there is no column besides the target {data.target!r}")
    return [*inputs, data.target]


def _inputs_and_target(values: np.ndarray, data: TableData, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        row, column = bad[0]
        raise ValueError(
            f"data.source: {data.source} has no finite number in row {row + 1:,}, column {names[column]!r}; "
            "fill it or remove the row"
        )
    return values[:, :-1].astype(np.float32), values[:, -1]


def _classes(targets: np.ndarray, data: TableData) -> np.ndarray:
    if targets.size != len(targets):
        raise ValueError(f"data.target: {data.target} has shape {targets.shape}; a class is one number for each row")
    flat = targets.reshape(-1)
    bad = np.flatnonzero(~((flat >= 0) & (np.floor(flat) == flat)))
    if len(bad):
        raise ValueError(
            f"data.target: {data.target} is {flat[bad[0]]:g} in row {bad[0] + 1:,}; classes are whole numbers from 0"
        )
    return flat.astype(np.int64)
