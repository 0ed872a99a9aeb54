"""What the tests share: workers, a cache of their own, and in CI no silent skips."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

from jobs import write_documents
from pool import Pool

on_gpu = Path("/dev/nvidiactl").exists()
collect_ignore = ["test_triton.py" if on_gpu else "test_gpu.py"]  # the same kernels, computed by one or the other
if not on_gpu:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports it: it decides there and then
settings.register_profile("busy", deadline=None)  # tests run beside each other on few cores
settings.load_profile("busy")
os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that wait for each other on a busy machine should sleep, not spin
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes are started: let them keep what they compile


@pytest.fixture(scope="session")
def pool() -> Pool:
    return Pool()


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("data") / "documents.jsonl")


@pytest.fixture(scope="session")
def references() -> dict[str, Any]:
    """Runs of one worker that others are compared with, by name."""
    return {}


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prepared data goes to a cache that the tests share and then remove."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("SLIPSTREAM_CACHE")
    os.environ["SLIPSTREAM_CACHE"] = str(folder)
    yield
    shutil.rmtree(folder, ignore_errors=True)
    if before is None:
        del os.environ["SLIPSTREAM_CACHE"]
    else:
        os.environ["SLIPSTREAM_CACHE"] = before


LONGEST = (
    "benchmarks", "fleet_ray", "one_curve", "data_remote", "data_prepared", "exchange_local", "packed", "kill",
    "planner", "exchange_codecs", "failures", "commands", "server", "fast", "examples", "links",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Three processes run the tests, a file at a time: with the longest first, all end at about the same time.

    Tests wait much of their time, for processes to start and for each other: two on two cores leave half of them idle.

    Layouts come last, when no test that watches the clock runs beside their eight processes.
    """
    order = {f"test_{name}": number for number, name in enumerate(LONGEST)}
    for number, name in enumerate(("layouts", "layout_cases", "layout_commands"), len(order) + 1):
        order[f"test_{name}"] = number
    others = len(LONGEST)
    items.sort(key=lambda item: order.get(item.path.stem, others))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:  # noqa: ARG001
    """In CI a test skipped for a missing component is a failure."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.skipped and os.environ.get("SLIPSTREAM_NO_SKIP") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, and in CI nothing is: {report.longrepr}"
