"""What was found by measuring, kept on disk: a later run on the same machine measures nothing, and takes the same."""

from collections.abc import Callable
from typing import Any

from slipstream.runs.cache import cache_folder
from slipstream.runs.folder import append_line, read_lines


def remembered(kind: str, what: str, measure: Callable[[], Any]) -> Any:
    """What was once found for this, or is now. It can be written as JSON."""
    memory = cache_folder() / f"{kind}.jsonl"
    for line in read_lines(memory) if memory.exists() else ():
        if line["what"] == what:
            return line["found"]
    found = measure()
    memory.parent.mkdir(parents=True, exist_ok=True)
    append_line(memory, {"what": what, "found": found})
    return found
