"""The programs of `examples/programs` as they are, on two workers of this machine, if their framework is here."""

import importlib.util
import shutil
from pathlib import Path

import pytest

from fleet import jobs
from program import slipstream

PROGRAMS = Path(__file__).parents[1] / "examples/programs"
SAYS = {
    "torch_ddp.py": ("torch", [], "epoch 2: loss 0."),
    "tensorflow_mirrored.py": ("tensorflow", [], "on 2 workers"),
    "jax_processes.py": ("jax", [], "on 2 processes"),
    "mpi_pi.py": ("mpi4py", ["--mpi"], "pi is about 3.14"),
}
"""What each needs, how it is submitted, and what it says in the end."""


def test_all_are_here() -> None:
    assert {file.name for file in PROGRAMS.glob("*.py")} == set(SAYS)
    assert {"torch", "mpi4py"} <= {needs for needs, *_ in SAYS.values() if importlib.util.find_spec(needs)}


@pytest.mark.parametrize("name", [name for name, (needs, *_) in SAYS.items() if importlib.util.find_spec(needs)])
def test_program(name: str, tmp_path: Path) -> None:
    _, options, end = SAYS[name]
    shutil.copy(PROGRAMS / name, tmp_path)
    sent = slipstream("submit", name, "--on", "local", "--workers", "2", *options, cwd=tmp_path)
    assert sent.returncode == 0, sent.stderr
    run = f"{Path(name).stem}-1"
    said = slipstream("logs", "-f", run, cwd=tmp_path)
    assert end in said.stdout, said.stdout
    assert jobs(tmp_path)[run]["status"] == "finished"
