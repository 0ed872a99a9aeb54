"""The benchmarks run, and leave a figure for each thing they compare. The figures themselves are not judged here."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(script: str, *words: str, out: Path) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / script), "--short", "--out", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    record: dict[str, Any] = json.loads(out.read_text())
    assert record["date"] and record["machine"] and record["versions"]["torch"]
    return record


def test_sides_are_compared(tmp_path: Path) -> None:
    record = run("cpu_train.py", "--sides", "slipstream,plain", "--processes", "2", out=tmp_path / "cpu_train.json")
    compared = {result["side"]: result for result in record["results"]}
    assert set(compared) == {"slipstream", "plain"}
    for result in compared.values():
        assert result["tokens_per_s"] > 0
        assert result["ratio"] > 0
        assert result["last_loss"] < result["first_loss"]
    assert compared["plain"]["ratio"] == 1


def test_layouts_are_compared(tmp_path: Path) -> None:
    record = run("layout_overhead.py", "--axes", "tensor", out=tmp_path / "layouts.json")
    (result,) = record["results"]
    assert result["slipstream"] > 0 and result["by hand"] > 0 and result["ratio"] > 0


def test_codecs_are_compared(tmp_path: Path) -> None:
    record = run("codecs.py", "--jobs", "digits", "--codecs", "topk", out=tmp_path / "codecs.json")
    compared = {result["codec"]: result for result in record["results"]}
    assert set(compared) == {"none", "topk"}
    assert compared["none"]["compression"] == compared["none"]["loss_ratio"] == 1
    assert compared["topk"]["compression"] > 1.5 and compared["topk"]["sent"] < compared["none"]["sent"]


def test_starting_up_is_timed(tmp_path: Path) -> None:
    record = run("startup.py", out=tmp_path / "startup.json")
    seconds = {result["what"]: result["seconds"] for result in record["results"]}
    assert 0 < seconds["import slipstream"] < seconds["first step"]
    assert 0 < seconds["slipstream --help"] < seconds["first step"]


def test_launches_are_compared(tmp_path: Path) -> None:
    results = run("launch.py", "--parts", "local", out=tmp_path / "launch.json")["results"]
    assert [result["side"] for result in results] == ["slipstream train", "slipstream submit --on local"]
    assert all(result["best_s"] > 0 for result in results)


def test_readers_of_data_are_compared(tmp_path: Path) -> None:
    words = ("--sides", "slipstream,bare", "--parts", "local")
    results = run("data.py", *words, out=tmp_path / "data.json")["results"]
    compared = {result["side"]: result for result in results["local"]}
    assert set(compared) == {"slipstream", "bare"}
    for result in compared.values():
        assert result["tokens_per_s"] > 0 and result["first_s"] > 0 and result["resume_s"] > 0


def test_encrypted_data_is_compared_with_plain(tmp_path: Path) -> None:
    words = ("--sides", "bare", "--parts", "encryption")
    results = run("data.py", *words, out=tmp_path / "data.json")["results"]
    for result in results["encryption"]:
        assert len(result["plain"]) == len(result["encrypted"]) == 3
        assert sorted(result["ratios"])[1] == result["ratio"] > 0


def test_preparing_is_timed(tmp_path: Path) -> None:
    words = ("--sides", "bare", "--parts", "prepare")
    results = run("data.py", *words, out=tmp_path / "data.json")["results"]
    assert results["prepare"][0]["ratio"] > 0


def test_an_order_that_has_changed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from order_kept import verdict

    assert verdict([[1, 2], [3, 4]], [[2, 1], [4, 3]]) == "same"
    assert verdict([[1, 2], [3, 4]], [[3, 4], [1, 2]]) == "changed (all there)"
    assert verdict([[1, 2], [3, 4]], [[1, 2], [2, 3]]) == "changed (lost 1, repeated 1)"


def test_searching_is_timed(tmp_path: Path) -> None:
    record = run("planner.py", out=tmp_path / "planner.json")
    (result,) = record["results"]
    assert result["layouts_per_s"] > 0 and result["plans"] > 100


def test_a_missing_peer_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cpu_train

    monkeypatch.setattr(cpu_train, "installed", lambda _: None)
    assert cpu_train.choose_sides(["slipstream", "plain", "hf"]) == ["slipstream", "plain"]
    assert "hf is left out: transformers, accelerate not installed" in capsys.readouterr().out


def test_gpu_sides_are_compared_in_short_on_a_cpu(tmp_path: Path) -> None:
    record = run("gpu_train.py", out=tmp_path / "gpu_train.json")
    compared = {result["side"]: result for result in record["results"]}
    assert set(compared) == {"slipstream", "plain"}
    for result in compared.values():
        assert result["per_s"] > 0 and result["utilisation"] >= 0 and result["first_step_s"] > 0
        assert result["memory_gb"] is None  # only a GPU tells
        assert result["last_loss"] < result["first_loss"]
    ours, plain = compared["slipstream"], compared["plain"]
    assert ours["ratio"] == 1 and plain["ratio"] == pytest.approx(ours["per_s"] / plain["per_s"], abs=1e-3)


def test_starting_and_saving_are_timed_in_short_on_a_cpu(tmp_path: Path) -> None:
    (found,) = run("gpu_saving.py", out=tmp_path / "gpu_saving.json")["results"]
    assert found["cold_s"] > 0 and found["warm_s"] > 0 and len(found["seconds"]) == 30
    assert found["cost"] == pytest.approx(found["saving_step_s"] / found["step_s"] - 1, abs=1e-3)


def test_curves_are_compared_in_short_on_a_cpu(tmp_path: Path) -> None:
    (found,) = run("gpu_curve.py", out=tmp_path / "gpu_curve.json")["results"]
    assert found["sides"] == ["fp32 on cpu", "bf16 on cpu"]
    exact, coarse = found["losses"]
    assert len(exact) == len(coarse) == 10 and exact != coarse and exact[-1] < exact[0]
    assert found["means"][0] == pytest.approx([sum(exact[:5]) / 5, sum(exact[5:]) / 5], abs=1e-5)
    assert 0 < max(map(abs, found["off"])) < 0.01


def test_predicted_jobs_are_measured_in_short_on_a_cpu(tmp_path: Path) -> None:
    (found,) = run("gpu_prediction.py", out=tmp_path / "gpu_prediction.json")["results"]
    assert found["fresh"] and float(found["row"]["seconds"]) > 0
    assert (tmp_path / "gpu_prediction.csv").read_text().count("\n") == 2


def test_short_steps_are_taken_apart_in_short_on_a_cpu(tmp_path: Path) -> None:
    (found,) = run("gpu_short.py", out=tmp_path / "gpu_short.json")["results"]
    assert found["step_s"] > 0 and found["computing_s"] > 0


def test_what_a_killed_benchmark_had_started_is_gone(tmp_path: Path) -> None:
    words = ("import sys", "from pathlib import Path", "from watched import started", "folder = Path(sys.argv[1])")
    sleeper = "[sys.executable, '-c', 'print(1, flush=True); import time; time.sleep(60)']"
    script = "; ".join(words) + f"\nwith started({sleeper}, folder, {{}}) as p: print(p.pid, flush=True); p.wait()"
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout
        pid = int(benchmark.stdout.readline())
        end = os.pidfd_open(pid)
        benchmark.kill()
    assert select.select([end], [], [], 10)[0], "it goes on"


def test_ways_of_adding_up_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from network import missing

    if reason := missing():
        pytest.skip(reason)
    rows = run("allreduce.py", out=tmp_path / "allreduce.json")["results"]
    assert [row["case"] for row in rows[::2]] == ["2 hosts × 2, unlimited", "2 hosts × 2, 2 ms delay"]
    for row in rows:
        assert set(row["seconds"]) == {"gloo", "ring", "tree", "halving-doubling", "hierarchical"}
        assert min(row["seconds"].values()) > 0 and 0 < row["auto_to_best"] <= 1
    assert min(rows[2]["seconds"].values()) > 0.004, (
        "no sum over long links is there before two messages have crossed them"
    )
    assert rows[2]["latency"] > 0.002


def test_rounds_go_on_until_every_median_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from allreduce import LEAST, MOST, _turns

    def rounds(spread: float, most: float) -> int:
        times: dict[str, list[float]] = {"gloo": [], "ring": []}
        for side in _turns(list(times), times, most):
            times[side].append(1.0 if side == "gloo" else 1.0 + spread * (len(times[side]) % 2))
        assert len(times["gloo"]) == len(times["ring"])
        return len(times["ring"])

    assert rounds(0.0, most=1e9) == LEAST
    assert LEAST < rounds(0.1, most=1e9) < rounds(0.2, most=1e9) < MOST == rounds(9.0, most=1e9)
    assert rounds(9.0, most=60.0) == 10, "or they have taken so many seconds"
    assert rounds(9.0, most=0.0) == 1


def test_hosts_go_with_the_block_that_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from network import hosts, missing

    if reason := missing():
        pytest.skip(reason)

    def names() -> set[str]:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        return {line.split()[0] for line in listed.splitlines() if line.startswith(f"ss{os.getpid()}x")}

    with pytest.raises(ZeroDivisionError), hosts(2, rate="100mbit", delay=0.001) as network:
        assert len(names()) == 2
        sleeper = network.start(0, ["sleep", "60"])
        raise ZeroDivisionError
    assert not names() and sleeper.poll() is not None


def test_exchanges_are_compared_over_slow_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from network import missing

    if reason := missing():
        pytest.skip(reason)
    words = ("--links", "100 Mbit/s", "--sides", "local + int8")
    rows = run("exchange_net.py", *words, out=tmp_path / "net.json")["results"]
    ddp, local = rows
    assert (ddp["side"], ddp["steps"], ddp["sooner"], ddp["fewer_bytes"]) == ("ddp", 16, 1, 1)
    assert local["side"] == "local + int8" and local["last_loss"] < local["curve"][0][2]
    assert local["bytes_per_step"] < ddp["bytes_per_step"] / 4
    assert (tmp_path / "net.png").stat().st_size > 1000


def test_parameter_servers_are_compared(tmp_path: Path) -> None:
    results = run("server.py", "--sides", "slipstream", out=tmp_path / "server.json")["results"]
    assert {result["measure"] for result in results} == {"pushes/s", "push + fetch/s"}
    assert all(result["side"] == "slipstream" and result["per_s"] > 0 for result in results)


def test_unequal_workers_are_compared(tmp_path: Path) -> None:
    results = run("unequal.py", "--sides", "balance", out=tmp_path / "unequal.json")["results"]
    even, balanced = results
    assert even["val_loss"] == pytest.approx(balanced["val_loss"], rel=1e-4)
    assert even["share"] is None and balanced["share"] != 8
