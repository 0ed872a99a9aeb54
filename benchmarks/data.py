"""Reading and preparing data: Slipstream beside mosaicml-streaming, litdata, Hugging Face datasets and no library.

All read the same tokens, each from the form that suits it, shuffled, into int64 batches, in processes of their own:
those of an environment apart (`make .venv-peers/.installed`), in process and with two processes of their loader, of
which the better counts. A side's figure is its best round. Tokens are counted over a whole epoch. Time runs from the
opening of the dataset, when all is imported: to the end of the epoch, to the first batch, and to the first batch of a
resume at 90%. (After the first batch those look quick who fetch much before it: that speed is shown beside.) Storage is
a real S3 server (SeaweedFS) on this machine, which shares its cores with the reader; nothing is on disk, or on its way
there, when a reading begins.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import RESULTS, alternate, console, facts, save, show
from encryption import measure_encryption
from loaders import OURS, SIDES, Datasets, Shape, Turn, choose_sides, clean_environment, turns_of
from memory import Peak
from order_kept import compare_orders
from prepare_text import measure_preparing, measure_preparing_memory

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from s3 import Server

Results = list[dict[str, Any]]
SHORT = Shape(sequence=128, samples=16_000)


def measure_reading(data: Datasets, sides: Sequence[str], rounds: int) -> Results:
    """Speed, first batch and resume of every side."""
    turns = turns_of(sides)
    found: dict[Turn, list[dict[str, Any]]] = {turn: [] for turn in turns}
    for turn in alternate(turns, rounds):
        console.print(str(turn), style="dim")
        os.sync()  # what the side before has left to be written is not for this one to wait for
        state = data.root / f"state-{SIDES[turn.side].module}-{turn.workers}"
        (read,) = data.read(turn, state=state, save_after=round(0.9 * data.shape.batches))
        (resumed,) = data.read(turn, state=state, resume=True, stop=1)
        found[turn].append({**read, "resume_s": resumed["first_s"]})
    best = [_best(turn, results) for turn, results in found.items()]
    return [
        max((each for each in best if each["side"] == side), key=lambda each: each["tokens_per_s"]) for side in sides
    ]


def _best(turn: Turn, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    def least(name: str) -> float | None:
        return min((each[name] for each in rounds if each[name] is not None), default=None)

    return {
        "side": turn.side,
        "workers": turn.workers,
        "tokens_per_s": max(each["tokens_per_s"] for each in rounds),
        "tokens_per_s_after_first": max(each["tokens_per_s_after_first"] for each in rounds),
        "first_s": least("first_s"),
        "resume_s": least("resume_s"),
        "rounds": [round(each["tokens_per_s"]) for each in rounds],
    }


def show_reading(title: str, results: Results) -> None:
    columns = ("side", "loader's processes", "million tokens/s", "rounds", "after first batch", "first s", "resume s")
    rows = [
        (
            each["side"],
            str(each["workers"]),
            f"{each['tokens_per_s'] / 1e6:.1f}",
            ", ".join(f"{speed / 1e6:.1f}" for speed in each["rounds"]),
            f"{each['tokens_per_s_after_first'] / 1e6:.1f}",
            _seconds(each["first_s"]),
            _seconds(each["resume_s"]),
        )
        for each in results
    ]
    show(f"{title}: shuffled int64 batches; seconds from opening the dataset, after imports", columns, rows)


def _seconds(value: float | None) -> str:
    return "nothing came" if value is None else f"{value:.3f}"


class Bench:
    """What is measured, and where."""

    def __init__(self, root: Path, sides: list[str], shape: Shape, rounds: int) -> None:
        self.root, self.sides, self.shape, self.rounds = root, sides, shape, rounds
        self._made: dict[int, Datasets] = {}

    def datasets(self, samples: int) -> Datasets:
        if samples not in self._made:
            self._made[samples] = Datasets(self.root / str(samples), replace(self.shape, samples=samples))
            self._made[samples].make(self.sides)
        return self._made[samples]

    def local(self) -> Results:
        results = measure_reading(self.datasets(self.shape.samples), self.sides, self.rounds)
        show_reading("from disk", results)
        return results

    def s3(self) -> Results:
        sides = [side for side in self.sides if SIDES[side].storage]
        data = Datasets(self.root / "s3", self.shape)
        data.make(sides)
        with server(self.root):
            data.upload(sides, "s3://data")
            results = measure_reading(data, sides, self.rounds)
        show_reading("from S3, nothing cached", results)
        return results

    def memory(self) -> Results:
        """Over a whole epoch, of a dataset and of one a tenth as large."""
        results = []
        for side in self.sides:
            result: dict[str, Any] = {"side": side}
            for samples in (self.shape.samples // 10, self.shape.samples):
                peak = Peak()
                (read,) = self.datasets(samples).read(Turn(side, 0), peak=peak)
                result[str(samples)] = peak.bytes - read["imported"]
            results.append(result)
        sizes = [str(size) for size in (self.shape.samples // 10, self.shape.samples)]
        columns = ("side", *(f"{int(size) * self.shape.sequence / 1e6:.0f}M tokens, MB" for size in sizes))
        rows = [(each["side"], *(f"{each[size] / 1e6:.0f}" for size in sizes)) for each in results]
        show("memory beyond what is imported, files not counted, at most", columns, rows)
        return results

    def order(self) -> Results:
        results = compare_orders(self.datasets(self.shape.samples // 10), self.sides)
        columns = ("side", "resumed", "2 loader processes", "2 ranks", "resumed on 2 ranks")
        show(
            "the order of samples, beside that of one run in one process", columns, [tuple(r.values()) for r in results]
        )
        return results

    def encryption(self) -> Results:
        return measure_encryption(self.root, self.shape, 4 * self.rounds - 1)

    def prepare(self) -> Results:
        return measure_preparing(self.root, 60_000_000 if self.shape != SHORT else 2_000_000)

    def prepare_memory(self) -> Results:
        return measure_preparing_memory(self.root, 1_000_000_000 if self.shape != SHORT else 2_000_000)


PARTS: dict[str, Callable[[Bench], Results]] = {
    "local": Bench.local,
    "s3": Bench.s3,
    "memory": Bench.memory,
    "order": Bench.order,
    "encryption": Bench.encryption,
    "prepare": Bench.prepare,
    "prepare-memory": Bench.prepare_memory,
}


@contextmanager
def server(root: Path) -> Iterator[None]:
    """An S3 server with a bucket `data`, which the environment names."""
    folder = root / "server"
    folder.mkdir()
    weed, before = Server(folder), dict(os.environ)
    try:
        weed.start()
        weed.make_bucket("data")
        os.environ.update(weed.environment)
        yield
    finally:
        weed.kill()
        os.environ.clear()
        os.environ.update(before)


def read_options() -> argparse.Namespace:
    def listed(names: Sequence[str]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            if unknown := set(chosen := text.split(",")) - set(names):
                raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: there are {', '.join(names)}")
            return chosen

        return parse

    sides = [side for side in SIDES if side not in OURS[1:]]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="little data and one round, to see that it works")
    parser.add_argument("--rounds", type=int, help="default: 2")
    parser.add_argument("--samples", type=int, default=Shape.samples, help="of 2,048 tokens; a multiple of 160")
    parser.add_argument("--parts", type=listed(list(PARTS)), default=list(PARTS)[:-1], help=", ".join(PARTS))
    parser.add_argument("--sides", type=listed(sides), default=sides, help=", ".join(sides))
    parser.add_argument("--out", type=Path, default=RESULTS / "data.json")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    clean_environment()
    shape = SHORT if options.short else Shape(samples=options.samples)
    rounds = options.rounds or (1 if options.short else 2)
    record, results, took = facts("tokenizers", "obstore"), {}, {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        bench = Bench(Path(folder), choose_sides(options.sides), shape, rounds)
        for part in options.parts:
            began = time.monotonic()
            results[part] = PARTS[part](bench)
            took[part] = round(time.monotonic() - began)
            console.print(f"{part} took {took[part]} s", style="dim")
    settings = {"rounds": rounds, "sequence": shape.sequence, "batch": shape.batch, "samples": shape.samples}
    save(options.out, {**record, "settings": settings, "seconds": took, "results": results})


if __name__ == "__main__":
    main()
