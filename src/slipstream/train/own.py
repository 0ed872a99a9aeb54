"""What every worker has for itself between exchanges (`exchange.kind: local`), in a checkpoint.

Under the ordinary names stands what all agreed on last, which any layout reads. `own/<ordinary name>` is what each
worker has in its place, [workers, …], of which a worker writes its row: its weights, running statistics and the
optimiser's state. As many workers read their rows again; any other number, or a single one, goes on from the mean of
all rows. `outer/…` belongs to the outer step and to an exchange under way.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.train.exchange.local import Held, Local
from slipstream.train.parallel.parts import Box
from slipstream.train.parallel.split import SplitModel

OWN = "own/"
State = dict[str, Any]


def written(state: State, model: SplitModel) -> State:
    """The state of a worker as it goes into a checkpoint."""
    exchange = model.exchange
    if not isinstance(exchange, Local):
        return state
    agreed, change = _agreed(model, exchange), _change(model, exchange) if exchange.sent else {}
    own = {key: value for key, value in state.items() if key in agreed or key.startswith("optimizer/")} | change
    same = {key: value for key, value in state.items() if key not in own}
    return same | agreed | _outer(model, exchange) | _rows(own, exchange.worker, exchange.workers)


def load_own(path: Path, state: State, model: SplitModel, saved: State) -> None:
    """Fill a worker's state from a checkpoint of workers that had each their own."""
    own = {key: value for key, value in state.items() if OWN + key in saved}
    workers = next(int(saved[OWN + key].size[0]) for key in own)
    exchange = model.exchange
    if isinstance(exchange, Local):
        sent = torch.zeros(2, dtype=torch.int64)
        agreed = _agreed(model, exchange) | _outer(model, exchange) | _mean(model, exchange) | {"outer/sent": sent}
        _read(path, {key: value for key, value in agreed.items() if key in saved})
        exchange.sent, exchange.bytes = sent.tolist()
        if exchange.workers == workers:
            own |= _change(model, exchange) if exchange.sent else {}
            _read(path, _rows(own, exchange.worker, workers))
            return
        exchange.forget_own()
    totals = {key: torch.zeros_like(_tensor(value)) for key, value in own.items()}
    for worker in range(workers):
        _read(path, _rows(own, worker, workers))
        for key, value in own.items():
            totals[key] += _tensor(value) / workers
    for key, value in own.items():
        _tensor(value).copy_(totals[key])


def _pieces(model: SplitModel, exchange: Local) -> list[tuple[str, Held, tuple[int, ...], tuple[int, ...]]]:
    """Name, what is held, shape of the whole and where in it this is."""
    held = exchange.held()
    parts = [(part.name, held[part.weight], part.shape, part.offset) for part in model.parts if part.weight in held]
    buffers = [
        (name, held[name], tuple(b.shape), (0,) * b.dim()) for name, b in model.buffers().items() if name in held
    ]
    return parts + buffers


def _agreed(model: SplitModel, exchange: Local) -> dict[str, Box]:
    pieces = _pieces(model, exchange)
    return {f"model/{name}": Box.of(held.anchor, shape, offset) for name, held, shape, offset in pieces}


def _outer(model: SplitModel, exchange: Local) -> State:
    """What the outer step keeps, and what has arrived of an exchange under way."""
    state: State = {
        f"outer/momentum/{name}": Box.of(held.momentum, shape, offset)
        for name, held, shape, offset in _pieces(model, exchange)
        if held.momentum is not None
    }
    if exchange.sent:
        state |= _mean(model, exchange) | {"outer/sent": torch.tensor([exchange.sent, exchange.bytes])}
    return state


def _mean(model: SplitModel, exchange: Local) -> dict[str, Box]:
    pieces = _pieces(model, exchange)
    return {f"outer/mean/{name}": Box.of(held.mean, shape, offset) for name, held, shape, offset in pieces}


def _change(model: SplitModel, exchange: Local) -> dict[str, Box]:
    return {
        f"change/{name}": Box.of(held.change, shape, offset)
        for name, held, shape, offset in _pieces(model, exchange)
        if held.change is not None
    }


def _rows(state: State, worker: int, workers: int) -> dict[str, Box]:
    """One worker's row of each."""
    rows = {}
    for key, value in state.items():
        tensor = _tensor(value)
        shape, offset = (value.size(), value.offset) if isinstance(value, Box) else (tensor.shape, (0,) * tensor.dim())
        rows[OWN + key] = Box.of(tensor[None], (workers, *shape), (worker, *offset))
    return rows


def _tensor(value: Tensor) -> Tensor:
    return value.tensor if isinstance(value, Box) else value


def _read(path: Path, state: State) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(state, storage_reader=FileSystemReader(path), no_dist=True)
