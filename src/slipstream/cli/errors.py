"""From what went wrong to what a person reads and what a script sees: the exit codes."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.runs.result import Result

REFUSED, STOPPED, NO_FLEET, AGAIN, INTERRUPTED = 2, 6, 8, 75, 130
"""AGAIN is for schedulers: the time limit was near, the run has saved itself and wants to be started again."""


def stopped_code(result: "Result") -> int:
    """The exit code of a run that was stopped: by a person, or at a limit."""
    return INTERRUPTED if result.reason == "interrupted" else STOPPED


def run_and_exit(program: Callable[..., Any]) -> int:
    """Run the program; the exit code says how it went."""
    try:
        program()
    except Exception as error:
        code = _report(error)
        if code is None:
            raise
        return code
    return 0


def _report(error: Exception) -> int | None:
    """Print what is known of an error and return its exit code; None if it is a bug of ours."""
    from slipstream.data.storage import StorageGone
    from slipstream.fleet.base import FleetError
    from slipstream.fleet.failure import NO_DATA, render
    from slipstream.fleet.watch import WorkersFailed
    from slipstream.job import JobError
    from slipstream.runs import RunError

    if isinstance(error, JobError):
        number = len(error.problems)
        print(f"the job cannot be run: {number} thing{'s' if number > 1 else ''} to mend", file=sys.stderr)
        print("\n".join(f"  {problem}" for problem in error.problems), file=sys.stderr)
        return REFUSED
    if isinstance(error, RunError):
        print(error, file=sys.stderr)
        return REFUSED
    if isinstance(error, FleetError):
        print(f"the fleet cannot take it: {error}", file=sys.stderr)
        return NO_FLEET
    if isinstance(error, StorageGone):
        print(f"the storage does not answer: {error}", file=sys.stderr)
        return NO_DATA
    if isinstance(error, OSError) and error.filename:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return REFUSED
    if isinstance(error, WorkersFailed):
        print(render(error.failure, error.run, error.stacks), file=sys.stderr)
        return error.failure.exit_code
    return None
