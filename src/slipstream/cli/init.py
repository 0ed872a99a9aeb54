"""`slipstream init`: write a commented job file for a chosen task."""

from pathlib import Path
from typing import Annotated

import typer

_EXAMPLES = Path(__file__).parent.parent / "examples"


def command(
    task: Annotated[str, typer.Argument(help="One of the tasks; without it they are listed.")] = "",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write. Default: TASK.yaml")] = None,
) -> None:
    """Write a commented job file to start from."""
    examples = {path.stem: path for path in sorted(_EXAMPLES.glob("*.yaml"))}
    if task not in examples:
        if task:
            from slipstream.job import JobError
            from slipstream.job.file import Problem, nearest

            raise JobError(
                [Problem("init", task, f"no such task{nearest(task, list(examples))}; tasks: {', '.join(examples)}")]
            )
        print("usage: slipstream init TASK, where TASK is one of")
        for name, path in examples.items():
            print(f"  {name:<16} {path.read_text().splitlines()[0].removeprefix('# ')}")
        return
    target = output or Path(f"{task}.yaml")
    if target.exists():
        from slipstream.runs import RunError

        raise RunError(f"{target} exists already; choose another name with --output")
    target.write_text(examples[task].read_text().replace("slipstream.examples.", ""))
    print(f"wrote {target}; now: slipstream train {target}")
    code = Path("own_model.py")
    if task == "own-model" and not code.exists():
        code.write_text((_EXAMPLES / code).read_text())
        print(f"wrote {code}, which it imports")
