"""The command line: one small file per command, no logic of its own."""

import sys

import typer

from slipstream.cli import (
    agent,
    attach,
    capacity,
    data,
    doctor,
    init,
    jobs,
    logs,
    offers,
    plan,
    probe,
    profile,
    resume,
    runs,
    schema,
    show,
    stop,
    submit,
    train,
    verify,
)
from slipstream.cli.errors import run_and_exit
from slipstream.runs.cache import keep_bytecode

app = typer.Typer(
    help="Train neural networks: one job file, one command, one curve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("init")(init.command)
app.add_typer(data.app, name="data")
app.command("plan")(plan.command)
app.command("train")(train.command)
app.command("submit")(submit.command)
app.command("jobs")(jobs.command)
app.command("attach")(attach.command)
app.command("logs")(logs.command)
app.command("stop")(stop.command)
app.command("capacity")(capacity.command)
app.command("agent", hidden=True)(agent.command)
app.command("verify")(verify.command)
app.command("resume")(resume.command)
app.command("runs")(runs.command)
app.command("show")(show.command)
app.add_typer(offers.app, name="offers")
app.command("probe")(probe.command)
app.command("profile")(profile.command)
app.command("schema")(schema.command)
app.command("doctor")(doctor.command)


_EXIT_CODES = (
    "Exit codes: 0 done, 2 refused, 3 a worker failed, 4 a worker hung, 5 loss not finite, 6 stopped at a limit, "
    "7 data out of reach, 8 the fleet cannot take it, 130 stopped by a person."
)


@app.callback(epilog=_EXIT_CODES)
def _main() -> None:
    """Train neural networks: one job file, one command, one curve."""


def main() -> None:
    """The program `slipstream`."""
    keep_bytecode()
    sys.exit(run_and_exit(app))
