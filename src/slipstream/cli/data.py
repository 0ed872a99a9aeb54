"""`slipstream data`: prepare a dataset once, look at it, check it."""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.errors import REFUSED
from slipstream.cli.options import AsJson

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Prepare a dataset, look at it, check it.")
Dest = Annotated[Path, typer.Argument(metavar="DEST", help="The folder of the dataset.", show_default=False)]


@app.command()
def prepare(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE… DEST",
            help="Text: .txt, .jsonl, .csv (also .gz, .zst), .parquet, patterns such as 'data/*.jsonl.gz', folders of "
            ".txt, python-stdlib, databases (postgresql://…, duckdb:///…, sqlite:///…) with --query; last the folder "
            "to make, or an address such as s3://bucket/folder.",
        ),
    ],
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer.json. Default: one is trained.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Entries of the tokeniser that is trained.")] = None,
    field: Annotated[str | None, typer.Option(help="Key or column that holds the text. Default: text.")] = None,
    query: Annotated[str | None, typer.Option(help="SQL, for a database: each row is a document.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. Default: one for each core.")] = None,
    shard: Annotated[int, typer.Option(min=1, help="Size of a shard in MiB.")] = 64,
) -> None:
    """Tokenise text into shards. Ended before it was done, the same command goes on where it was."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from slipstream.data.preparing import prepare_text, size_of, staging_folder, text_sources, upload
    from slipstream.data.queries import is_address
    from slipstream.data.storage import StorageGone, is_remote
    from slipstream.plan import this_machine

    if len(paths) < 2 or is_address(paths[-1]):
        print("say what to prepare and where to: slipstream data prepare SOURCE… DEST", file=sys.stderr)
        raise typer.Exit(REFUSED)
    *names, dest = paths
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    try:
        sources = text_sources(names, tokenizer, vocabulary, field, query)
        with Progress(*columns, transient=True) as bar:
            task = bar.add_task("", total=size_of(sources), rate="")

            def progress(characters: int, tokens: int) -> None:
                speed = bar.tasks[0].speed or 0.0
                bar.update(task, completed=characters, rate=f"{tokens / 1e6:,.1f}M tokens, {speed / 1e6:.1f} MB/s")

            say = lambda text: bar.console.print(text, highlight=False)  # noqa: E731
            cores = this_machine().cores
            folder = staging_folder(dest) if is_remote(dest) else Path(dest)
            made = prepare_text(sources, folder, workers or cores, shard * 2**20, progress, say)
            if is_remote(dest):
                upload(folder, dest, say)
                shutil.rmtree(folder)
    except (ValueError, StorageGone) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(REFUSED) from None
    print(f"{made.tokens:,} tokens of {made.documents:,} documents in {len(made.shards):,} shards: {dest}")
    print(f"in a job file: data: {{prepared: {dest}, sequence: …}}")


@app.command()
def inspect(dest: Dest, as_json: AsJson = False) -> None:
    """Show what a dataset holds."""
    from slipstream.data.manifest import read_manifest

    try:
        manifest = read_manifest(dest, "DEST")
    except ValueError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(REFUSED) from None
    if as_json:
        print(json.dumps(asdict(manifest), indent=1))
        return
    facts = {
        "tokens": f"{manifest.tokens:,}",
        "documents": f"{manifest.documents:,}",
        "vocabulary": f"{manifest.ids.vocabulary:,}",
        "stored as": manifest.dtype,
        "shards": f"{len(manifest.shards):,} of {manifest.each:,} tokens",
        "page": f"{manifest.page:,} bytes",
    }
    for name, value in facts.items():
        print(f"{name:<12}{value}")


@app.command()
def verify(dest: Dest) -> None:
    """Check every byte of a dataset."""
    from slipstream.data.verifying import verify as find_wrong

    seen = 0

    def checked(size: int) -> None:
        nonlocal seen
        seen += size

    try:
        wrong = list(find_wrong(dest, checked))
    except ValueError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(REFUSED) from None
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong:
        raise typer.Exit(1)
    print(f"{seen:,} bytes of tokens are as they were prepared")
