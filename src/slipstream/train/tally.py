"""Steps that are done, counted in their order: what the run has come to, and who wishes to save or to stop.

On a GPU a step is read while the next one runs; where workers go by themselves, some steps later.
"""

import math
from collections import deque

from slipstream.job import Job
from slipstream.runs import Pulse
from slipstream.runs.checkpoints import Progress
from slipstream.train.batches import Share
from slipstream.train.found import Found, Launched
from slipstream.train.parallel.split import SplitModel
from slipstream.train.record import Recorder
from slipstream.train.update import Update


class NonFiniteLoss(RuntimeError):
    """The loss of a step is NaN or infinite, and the job says to stop."""


class PeerStopped(RuntimeError):
    """Another worker found the reason to stop; its report is the one to read."""


class Tally:
    """Where the run is, by the steps that were read."""

    def __init__(
        self, job: Job, model: SplitModel, update: Update, recorder: Recorder, pulse: Pulse, progress: Progress
    ) -> None:
        self._model, self._update, self._recorder, self._pulse = model, update, recorder, pulse
        self._stops_at_nonfinite = job.train.on_nonfinite == "stop"
        self._late: deque[Launched] = deque()
        self.progress = progress
        self.stopped: str | None = None
        """Why to stop before the end, if so."""

    @property
    def hurries(self) -> bool:
        """Whether a step must be read before the next one begins."""
        return self._update.waits and not self._model.exchange.behind

    def put_off(self, step: Launched) -> None:
        """This one can be counted later."""
        self._late.append(step)

    def catch_up(self, everything: bool) -> bool:
        """Count what was put off: all of it, or what has waited for long enough. Whether somebody wishes to save."""
        wished = False
        while self._late and (everything or wished or len(self._late) >= self._model.exchange.behind):
            step = self._late.popleft()
            found = self.count(step)
            self.record(step, found)
            wished = wished or found.agreed.save or self.stopped is not None
        return wished

    def count(self, step: Launched) -> Found:
        """Wait until a step is done, and take what it has found into account."""
        with self._pulse.during("update"):
            found = step.found()
            if self._stops_at_nonfinite and not math.isfinite(found.agreed.loss):
                refuse_nonfinite(found.losses, step.share, step.number)
                raise PeerStopped(
                    f"the loss is {found.agreed.loss} at step {step.number}, from another worker's samples"
                )
        if found.counts:
            self.progress = self._advanced(step.share, found)
        self.stopped = self.stopped or found.agreed.stop
        return found

    def record(self, step: Launched, found: Found, judged: dict[str, float] | None = None) -> None:
        """Write its line, with what was judged after it."""
        if found.counts:
            self._recorder.step(self.progress, step.share, found, judged or {})

    def _advanced(self, share: Share, found: Found) -> Progress:
        scale = self._update.scale
        return Progress(
            step=self.progress.step + 1,
            samples=share.start + share.size,
            skipped=self.progress.skipped + found.skipped,
            scale=scale.value if scale.active else None,
            good_steps=scale.good_steps,
            late=self._model.late,
        )


def refuse_nonfinite(losses: list[float], share: Share, step: int) -> None:
    """Name the samples whose loss is not finite, if there are any."""
    for loss, micro in zip(losses, share.micro_batches, strict=True):
        if not math.isfinite(loss):
            first, last = int(micro.positions[0]), int(micro.positions[-1])
            numbers = ", ".join(map(str, micro.indices[:8].tolist())) + (", …" if len(micro.indices) > 8 else "")
            raise NonFiniteLoss(
                f"the loss is {loss} at step {step}, in samples {first} to {last} of the run "
                f"(numbers {numbers} of the data)"
            )
