"""`slipstream data`: prepare a dataset once, look at it, check it."""

import json
import multiprocessing
import sys
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.errors import INTERRUPTED, REFUSED
from slipstream.cli.options import AsJson

if TYPE_CHECKING:
    from slipstream.data.manifest import Manifest

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Prepare a dataset, look at it, check it.")
_NAMES = 10
"""Classes that are shown."""
Dest = Annotated[
    str, typer.Argument(metavar="DEST", help="The folder of the dataset, or its address.", show_default=False)
]


@app.command()
def prepare(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE… DEST",
            help="Text: .txt, .jsonl, .csv (also .gz, .zst), .parquet, patterns such as 'data/*.jsonl.gz', folders of "
            ".txt, python-stdlib, databases (postgresql://…, duckdb:///…, sqlite:///…) with --query. Tokens or "
            "numbers: .npy. Images: a folder with a folder for each class, or with MNIST's files. Last the folder to "
            "make, or an address such as s3://bucket/folder.",
        ),
    ],
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer.json. Default: one is trained.")] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="Entries of the tokeniser that is trained; token ids of .npy files.")
    ] = None,
    field: Annotated[str | None, typer.Option(help="Key or column that holds the text. Default: text.")] = None,
    query: Annotated[str | None, typer.Option(help="SQL, for a database: each row is a document.")] = None,
    targets: Annotated[str | None, typer.Option(help="The .npy file of targets: SOURCE holds the inputs.")] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Height and width that images are resized to.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. Default: one for each core.")] = None,
    shard: Annotated[int, typer.Option(min=1, help="Size of a shard in MiB.")] = 64,
    encrypt: Annotated[
        bool, typer.Option("--encrypt", help="Encrypt all of it, by the key that SLIPSTREAM_DATA_KEY holds.")
    ] = False,
) -> None:
    """Make shards of tokens, or of whole samples. Ended before it was done, the same command goes on where it was."""
    _import_for_workers()
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from slipstream.data.destinations import destination
    from slipstream.data.kinds import Options, preparation
    from slipstream.data.making import Making
    from slipstream.data.queries import is_address
    from slipstream.data.storage import StorageGone
    from slipstream.plan import this_machine

    if len(paths) > 1 and is_address(paths[-1]):
        print("DEST: a dataset goes into a folder, or to s3://…, gs://… or az://…", file=sys.stderr)  # no password
        raise typer.Exit(REFUSED)
    if len(paths) < 2:
        print("say what to prepare and where to: slipstream data prepare SOURCE… DEST", file=sys.stderr)
        raise typer.Exit(REFUSED)
    *names, dest = paths
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    try:
        ready = preparation(names, Options(tokenizer, vocabulary, field, query, targets, size, workers))
        with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as bar:
            task = bar.add_task("", total=ready.total, rate="")

            def progress(done: int, items: int) -> None:
                bar.update(task, completed=done, rate=ready.rate(items, bar.tasks[0].speed or 0.0))

            say = lambda text: bar.console.print(text, highlight=False)  # noqa: E731
            cores = this_machine().cores
            making = Making(destination(dest), workers or cores, shard * 2**20, encrypt, progress, say)
            made = making.make(ready.make)
    except (ValueError, StorageGone) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(REFUSED) from None
    except KeyboardInterrupt:
        print("stopped; the same command goes on after the last whole shard", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    _print_made(made, dest)


def _import_for_workers() -> None:
    """A process imports, beside this one, what all workers need, and is then forked into them. Not this one: the
    tokeniser has threads, which do not survive that."""
    multiprocessing.set_forkserver_preload(["__main__", "slipstream.data.preparing"])
    forkserver.ensure_running()


@app.command()
def inspect(dest: Dest, as_json: AsJson = False) -> None:
    """Show what a dataset holds."""
    from slipstream.data.manifest import manifest_values
    from slipstream.data.prepared import manifest_at

    try:
        manifest = manifest_at(dest, "DEST")
    except ValueError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(REFUSED) from None
    if as_json:
        print(json.dumps(manifest_values(manifest), indent=1))
        return
    facts = {
        **_contents(manifest),
        "shards": f"{len(manifest.shards):,} of {manifest.each:,} items",
        "page": f"{manifest.page:,} bytes",
        "encrypted": f"for key {manifest.seal.key}" if manifest.seal else "no",
    }
    for name, value in facts.items():
        print(f"{name:<12}{value}")


def _print_made(made: "Manifest", dest: str) -> None:
    from slipstream.data.holding import Ids
    from slipstream.data.store import plural

    what, more, task = "samples", "", ""
    if isinstance(made.holds, Ids):
        what, more = f"tokens of {plural(made.documents, 'document')}", ", sequence: …"
    else:
        task = f", train: {{task: {'classification' if made.holds.has_classes else 'regression'}, …}}"
    print(f"{made.items:,} {what} in {plural(len(made.shards), 'shard')}: {dest}")
    if made.seal:
        print(f"encrypted: it can be read with key {made.seal.key}")
    print(f"in a job file: data: {{prepared: {dest}{more}}}{task}")


def _contents(manifest: "Manifest") -> dict[str, str]:
    from slipstream.data.holding import Ids

    holds = manifest.holds
    if isinstance(holds, Ids):
        return {
            "tokens": f"{manifest.items:,}",
            "documents": f"{manifest.documents:,}",
            "vocabulary": f"{holds.vocabulary:,}",
            "stored as": manifest.dtype.str,
        }
    known = holds.classes or ()
    names = f": {', '.join(known[:_NAMES])}{', …' if len(known) > _NAMES else ''}" if known else ""
    outputs = {"classes": f"{holds.outputs:,}{names}"} if holds.has_classes else {"outputs": f"{holds.outputs:,}"}
    return {"samples": f"{manifest.items:,}", "inputs": str(holds.inputs), "target": str(holds.target), **outputs}


@app.command()
def verify(dest: Dest) -> None:
    """Check every byte of a dataset."""
    from slipstream.data.storage import StorageGone
    from slipstream.data.verifying import verify as find_wrong

    seen = 0

    def checked(size: int) -> None:
        nonlocal seen
        seen += size

    try:
        wrong = list(find_wrong(dest, checked))
    except (ValueError, StorageGone) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(REFUSED) from None
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong:
        raise typer.Exit(1)
    print(f"{seen:,} bytes are as they were prepared")


@app.command(name="new-key")
def new_key() -> None:
    """Print a fresh key for SLIPSTREAM_DATA_KEY. Keep it: without it an encrypted dataset cannot be read."""
    from slipstream.data.keys import new_key as make_key

    print(make_key())
