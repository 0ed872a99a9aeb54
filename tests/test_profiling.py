"""`slipstream profile`: where the time of a step goes."""

import json
import subprocess
import sys

import pytest

from jobs import decoder_job, write_documents
from program import slipstream, write_job
from slipstream.job import dump
from slipstream.profiling import kind_of


def test_the_parts_of_a_step_add_up(tmp_path):
    job = decoder_job(write_documents(tmp_path / "documents.jsonl"), **{"train.precision": "fp32"})
    path = write_job(tmp_path, dump(job))
    done = slipstream("profile", path, "--steps", "3", "--trace", "trace.json", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    spent = json.loads(done.stdout)
    assert sum(spent["kinds"].values()) == pytest.approx(spent["step"], rel=0.3), "threads may overlap a little"
    assert min(spent["kinds"][kind] for kind in ("matrix", "attention", "optimiser", "memory")) > 0
    assert spent["kernels"] and spent["flops"] > spent["attention_flops"] > 0
    names = {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"forward", "backward", "update"} <= names
    assert not (tmp_path / "runs").exists()


STEPS = 5


def test_a_rehearsal_makes_no_room_for_checkpoints(tmp_path):
    """Its steps, and those of the next one, would be timed beside the pinning of memory."""
    job = decoder_job(write_documents(tmp_path / "documents.jsonl"), **{"train.steps": STEPS})
    path = write_job(tmp_path, dump(job))
    script = f"""
from slipstream.job import load_job
from slipstream.plan import make_plan, this_machine
from slipstream.planning import prepare_data
from slipstream.rehearsal import Until, rehearse
from slipstream.train.mirror import Mirror
Mirror.prepare = lambda *_, **__: print("prepared")
job = load_job({str(path)!r})
prepare_data(job, lambda _: None, ".")
for last in (3, 99):
    lines = rehearse(job, make_plan(job, this_machine(), workers=1), lambda path: Until(path, last))
    print(len(lines))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == f"3\n{STEPS}\n", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "layout.tensor=2"], "layout.tensor: the work of one worker"),
        (["--set", "train.precison=fp8"], "train.precison: unknown key"),
        (["--trace", "nowhere/trace.json"], "--trace: nowhere/trace.json cannot be written"),
    ],
)
def test_what_cannot_be_is_said(words, said, tmp_path):
    path = write_job(tmp_path, dump(decoder_job(write_documents(tmp_path / "documents.jsonl"))))
    refused = slipstream("profile", path, *words, cwd=tmp_path)
    assert refused.returncode == 2 and said in " ".join(refused.stderr.split()), refused.stderr


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matrix"),
        ("aten::addmm", "matrix"),
        ("aten::convolution_backward", "matrix"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("_adamw", "optimiser"),
        ("void at::native::multi_tensor_apply_kernel<FusedOptimizer>", "optimiser"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "exchange"),
        ("Memcpy HtoD (Pinned -> Device)", "data"),
        ("Memcpy DtoD (Device -> Device)", "memory"),
        ("triton_poi_fused_mul_silu_7", "memory"),
        ("aten::mul_", "memory"),
        ("forward", None),
    ],
)
def test_what_a_kernel_is_for(name, kind):
    assert kind_of(name) == kind
