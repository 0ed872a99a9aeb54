"""`slipstream profile`: where the time of a step goes."""

import json

import pytest

from jobs import decoder_job, merge, write_documents
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
    split = write_job(tmp_path, merge(dump(job), {"layout": {"tensor": 2}}), "split.yaml")
    refused = slipstream("profile", split, cwd=tmp_path)
    assert refused.returncode == 2 and "layout" in refused.stderr


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matrix"),
        ("aten::addmm", "matrix"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("_adamw", "optimiser"),
        ("void at::native::multi_tensor_apply_kernel<FusedOptimizer>", "optimiser"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "exchange"),
        ("Memcpy HtoD (Pinned -> Device)", "data"),
        ("triton_poi_fused_mul_silu_7", "memory"),
        ("aten::mul_", "memory"),
        ("forward", None),
    ],
)
def test_what_a_kernel_is_for(name, kind):
    assert kind_of(name) == kind
