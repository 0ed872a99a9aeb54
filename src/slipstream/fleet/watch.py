"""Watching over all ranks of a launch, wherever they are, until the last has ended."""

import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from slipstream.fleet.crew import Crew, State
from slipstream.fleet.failure import Failure, first_cause, killed
from slipstream.fleet.mirror import make_whole
from slipstream.fleet.scratch import NO_ANSWER, Scratch
from slipstream.job.job import Limits
from slipstream.runs import RunFolder, truncate_metrics
from slipstream.runs.checkpoints import find_checkpoint, read_progress

_TICK = 0.05
_MOST_RESTARTS = 10
"""Of one rank, where those that were killed are started again."""
_GRACE = 2.0
"""Seconds the other workers have to end by themselves after one has failed."""


class WorkersFailed(RuntimeError):
    """The run ended before its time."""

    def __init__(self, failure: Failure, run: RunFolder, stacks: dict[int, str]) -> None:
        super().__init__(f"rank {failure.rank} failed at step {failure.step} in {failure.phase}: {failure.message}")
        self.failure = failure
        self.run = run
        self.stacks = stacks


class Watch:
    """All ranks of one launch. `crews` says who has which; the ranks from `servers` on are servers."""

    def __init__(self, run: RunFolder, scratch: Scratch, crews: Mapping[int, Crew], servers: range) -> None:
        self._run, self._scratch, self._crews, self._servers = run, scratch, dict(sorted(crews.items())), servers
        self._again: Counter[int] = Counter()
        """How often each rank was started again."""
        self._asked = False

    def run_to_end(self, limits: Limits | None, restore: Path | None, tick: Callable[[], None]) -> None:
        """Start the ranks and watch them; `tick` is called many times a second. Raises WorkersFailed.

        Without limits nobody is taken for hanging: programs of others show no signs of life.
        """
        try:
            self._start(list(self._crews), restore)
            self._watch(limits, tick)
        finally:
            for crew in set(self._crews.values()):
                crew.close()

    def interrupt(self) -> None:
        """Ask the workers for a checkpoint and a stop."""
        self._asked = True
        for crew in set(self._crews.values()):
            crew.ask_to_stop()

    def _start(self, ranks: list[int], restore: Path | None) -> None:
        for crew, own in self._by_crew(ranks):
            crew.start(own, restore)

    def _end(self, ranks: list[int]) -> None:
        for crew, own in self._by_crew(ranks):
            crew.end(own)

    def _by_crew(self, ranks: list[int]) -> list[tuple[Crew, list[int]]]:
        crews = dict.fromkeys(self._crews[rank] for rank in ranks)
        return [(crew, [rank for rank in ranks if self._crews[rank] is crew]) for crew in crews]

    def _states(self) -> dict[int, State]:
        found: dict[int, State] = {}
        for crew in set(self._crews.values()):
            found |= crew.states()
        return dict(sorted(found.items()))

    def _watch(self, limits: Limits | None, tick: Callable[[], None]) -> None:
        while True:
            states = self._states()
            codes = {rank: state.code for rank, state in states.items()}
            if self._asked and -signal.SIGTERM in codes.values():
                raise KeyboardInterrupt  # asked so early that a worker could not listen yet
            if all(codes[rank] == 0 for rank in self._servers or codes):  # servers end when the run does
                return
            if any(codes.values()) and not self._start_again(states):
                raise WorkersFailed(self._gather_failures(), self._run, {})
            late = find_hanging(states, limits) if limits else None
            if late is not None:
                self._end_hanging(late, states)
            tick()
            time.sleep(_TICK)

    def _start_again(self, states: dict[int, State]) -> bool:
        """With servers those that were killed come back: a worker as it is, servers all together from the last
        checkpoint. What failed by itself would do so again."""
        gone = [rank for rank, state in states.items() if state.code]
        killed_ones = [rank for rank in gone if not states[rank].failure]
        self._again.update(killed_ones)
        if not self._servers or not killed_ones or max(self._again[rank] for rank in gone) > _MOST_RESTARTS:
            return False
        for rank in killed_ones:
            if rank not in self._servers:
                self._run.event("restart", rank=rank)
                self._start([rank], None)
        if any(rank in self._servers for rank in killed_ones):
            make_whole(self._run)
            checkpoint = find_checkpoint(self._run.checkpoints, lambda text: self._run.event("warning", text=text))
            step = read_progress(checkpoint).step if checkpoint else 0
            self._end(list(self._servers))
            self._scratch.forget_meeting()
            truncate_metrics(self._run.metrics, step)
            self._run.event("restart", rank=self._servers[0], servers=len(self._servers), step=step)
            self._start(list(self._servers), checkpoint)
        return True

    def _who(self, rank: int) -> str:
        if rank in self._servers:
            return f"server {self._servers.index(rank) + 1} of {len(self._servers)}"
        return "the worker"

    def _end_hanging(self, late: int, states: dict[int, State]) -> None:
        """Raises WorkersFailed, unless the one that hangs can be started again. Where all wait in an exchange, the only
        one that does not answer is whom they wait for."""
        stacks = self._stacks()
        mute = [rank for rank, stack in stacks.items() if stack == NO_ANSWER]
        rank = mute[0] if len(mute) == 1 and states[late].phase == "exchange" else late
        state, text = states[rank], f"{self._who(rank)} has shown no sign of life for {states[rank].still:.0f} s"
        if not self._ends(rank, text):
            raise WorkersFailed(Failure(rank, state.step, state.phase, "hanging", text), self._run, stacks)

    def _ends(self, rank: int, text: str) -> bool:
        """With servers a worker that hangs is ended, to be started again like one that was killed."""
        if not self._servers or rank in self._servers or self._again[rank] >= _MOST_RESTARTS:
            return False
        self._run.event("warning", text=f"worker {rank}: {text}; it is ended")
        self._end([rank])
        return self._states()[rank].code is not None

    def _gather_failures(self) -> Failure:
        """Give every worker a moment to say what it knows, then name the first cause."""
        until = time.monotonic() + _GRACE
        while time.monotonic() < until and any(state.code is None for state in self._states().values()):
            time.sleep(_TICK)
        return first_cause(
            [
                state.failure or killed(rank, state.step, state.phase, state.code, self._who(rank))
                for rank, state in self._states().items()
                if state.code
            ]
        )

    def _stacks(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for crew in set(self._crews.values()):
            found |= crew.stacks()
        return found


def find_hanging(states: dict[int, State], limits: Limits) -> int | None:
    """The one that the others wait for, when it has shown no sign of life for too long."""
    running = {rank: state for rank, state in states.items() if state.code is None}
    limit = {rank: limits.step if state.step > 1 else limits.first_step for rank, state in running.items()}
    late = [rank for rank, state in running.items() if state.still > limit[rank]]
    if not late:
        return None
    # Those that wait in an exchange are waiting for someone; the one that is elsewhere is whom they wait for.
    rank = min(late, key=lambda rank: (running[rank].phase == "exchange", -running[rank].still))
    state = running[rank]
    elsewhere = any(other.phase != "exchange" for other in running.values())
    if state.phase == "exchange" and elsewhere and state.still < 2 * limit[rank]:
        return None  # who came there a little later will soon be late too, and is the one to name
    return rank
