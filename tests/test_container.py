"""The container file. Nothing here can build it; a parser reads it, and what it names must be there."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def steps() -> list[dict[str, Any]]:
    with (ROOT / "container/Dockerfile").open("rb") as file:
        found: list[dict[str, Any]] = DockerfileParser(fileobj=file).structure
    return found


def values(steps: list[dict[str, Any]], instruction: str) -> list[str]:
    return [step["value"] for step in steps if step["instruction"] == instruction]


def test_every_base_is_pinned(steps: list[dict[str, Any]]) -> None:
    (version,) = values(steps, "ARG")
    assert re.fullmatch(r"PYTHON=3\.\d+\.\d+-slim-\w+", version)
    stages = [value.split() for value in values(steps, "FROM")]
    names = {stage[2] for stage in stages}
    assert all(stage[0] == "python:${PYTHON}" or stage[0] in names for stage in stages)
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    least = project["requires-python"].removeprefix(">=").split(".")
    assert [int(part) for part in version.removeprefix("PYTHON=").split(".")[:2]] >= [int(part) for part in least]


def test_torch_and_the_extras_are_those_of_the_package(steps: list[dict[str, Any]]) -> None:
    (install,) = [step for step in values(steps, "RUN") if step.startswith("pip install")]
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert next(each for each in project["dependencies"] if each.startswith("torch")) in install
    (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", install)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (everything,) = project["optional-dependencies"]["all"]
    (all_of_them,) = re.findall(r"\[([\w,]+)\]", everything)
    assert set(all_of_them.split(",")) - set(extras.split(",")) == {"kubernetes"}, "a pod asks no cluster for pods"


def test_what_it_copies_is_there_and_is_sent(steps: list[dict[str, Any]]) -> None:
    sources = [
        name
        for value in values(steps, "COPY")
        if not value.startswith("--from=")
        for name in value.split()[:-1]
    ]  # fmt: skip
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources and set(sources) == sent
    assert all((ROOT / name).exists() for name in sources)
    froms = {value.split()[0].removeprefix("--from=") for value in values(steps, "COPY") if value.startswith("--from=")}
    assert froms <= {value.split()[2] for value in values(steps, "FROM")}


def test_the_image_is_small_and_runs_as_nobody_in_particular(steps: list[dict[str, Any]]) -> None:
    assert steps[[step["instruction"] for step in steps].index("USER")]["value"] == "1000:1000"
    last = max(number for number, step in enumerate(steps) if step["instruction"] == "FROM")
    assert any(step["instruction"] == "USER" for step in steps[last:]), "of the stage that is built"
    (packages,) = [value for value in values(steps, "RUN") if "apt-get install" in value]
    installed = re.findall(r"--no-install-recommends ([\w -]+?) *&&", packages)
    assert installed == ["gcc libc6-dev"], "what Triton needs at run time, and nothing else"
    assert "rm -rf /var/lib/apt/lists" in packages
