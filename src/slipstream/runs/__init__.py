"""What a run leaves behind: its folder, metrics, events, pulse and picture."""

from slipstream.runs.folder import (
    RunError,
    RunFolder,
    append_line,
    find_runs,
    is_run,
    new_run_path,
    read_lines,
    truncate_metrics,
    write_text,
    write_yaml,
)
from slipstream.runs.picture import draw_curve
from slipstream.runs.pulse import Beat, Pulse, create_pulse, read_pulse

__all__ = [
    "Beat",
    "Pulse",
    "RunError",
    "RunFolder",
    "append_line",
    "create_pulse",
    "draw_curve",
    "find_runs",
    "is_run",
    "new_run_path",
    "read_lines",
    "read_pulse",
    "truncate_metrics",
    "write_text",
    "write_yaml",
]
