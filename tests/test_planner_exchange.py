"""What the planner knows of exchanges: their memory, bytes and time, and the layouts that they go with."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from program import slipstream, write_job
from slipstream.data.base import Facts
from slipstream.job import Job, JobError, dump
from slipstream.job.servers import Server
from slipstream.plan import Layout, make_plan
from slipstream.plan.exchange import PLAIN, Agreement, served
from slipstream.plan.fit import misfits
from slipstream.plan.grid import Grid, Hardware, style_of
from slipstream.plan.here import Here
from slipstream.plan.machine import ANY_MACHINE, Machine
from slipstream.plan.memory import Memory, memory
from slipstream.plan.rates import fitted_rates
from slipstream.plan.search import layout_of, layouts_for, rows_of, search
from slipstream.plan.time import Times, step_time
from slipstream.plan.wanted import decoder_of, wanted_of
from slipstream.planning import plan
from slipstream.train.dry_run import dry_run
from slipstream.train.exchange import Sum, build_exchange
from slipstream.train.models import build_model
from slipstream.train.server.client import Client
from slipstream.train.server.desk import Desk
from slipstream.train.server.flat import Flat
from slipstream.train.server.tickets import Async, Sync
from test_planner import offer

VOCABULARY, SEQUENCE, WORKERS = 2000, 32, 4
CODECS: list[Any] = [
    "fp16", "bf16", "int8", {"name": "int8", "feedback": True}, "onebit", "topk", "randomk", "powersgd",
    {"name": "powersgd", "feedback": False, "warm": False}, {"name": "topk", "part": 0.01},
]  # fmt: skip
LOCAL: list[dict[str, Any]] = [
    {"kind": "local"},
    {"kind": "local", "overlap": 2},
    {"kind": "local", "every": 4, "outer": {"momentum": 0.9, "nesterov": True}, "overlap": 1, "codec": "onebit"},
]
SUMMING = [{}, *({"codec": codec} for codec in CODECS), *LOCAL]


def job_of(exchange: dict[str, Any], layout: Any = None, **changes: Any) -> Job:
    model = {"kind": "decoder", "layers": 3, "hidden": 128, "heads": 4, "positions": "learned", "bias": True, **changes}
    return Job.model_validate(
        {
            "name": "agreed",
            "model": model,
            "data": {"source": "tokens.npy", "tokens": True, "sequence": SEQUENCE, "vocabulary": VOCABULARY},
            "train": {"steps": 100, "batch": 64, "optimizer": {"name": "adamw", "lr": 1e-3}},
            "exchange": without_warmup(exchange),
            "layout": layout or {"replicate": WORKERS, "micro_batch": 2},
        }
    )


def without_warmup(exchange: dict[str, Any]) -> dict[str, Any]:
    codec = exchange.get("codec")
    named = {"name": codec} if isinstance(codec, str) else codec
    return {**exchange, "codec": {"warmup": 0, **named}} if named else exchange


def predicted(job: Job, **changes: Any) -> Memory:
    work = decoder_of(job, VOCABULARY)
    assert work is not None
    agreement = replace(Agreement(job.exchange), **changes)
    return memory(work, Grid.of(make_plan(job, ANY_MACHINE).layout), job.train.batch, 2, agreement=agreement)


@contextmanager
def as_one_of(workers: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=workers, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def tensors_of(thing: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    """All tensors that can be reached."""
    if id(thing) in seen:
        return
    seen[id(thing)] = thing
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict | list | tuple):
        for each in thing.values() if isinstance(thing, dict) else thing:
            yield from tensors_of(each, seen)
    elif type(thing).__module__.startswith("slipstream"):
        yield from tensors_of(vars(thing), seen)


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", SUMMING, ids=str)
def test_an_exchange_holds_what_is_predicted_and_sends_as_much(exchange: dict[str, Any]) -> None:
    """On real tensors: every one that can be reached from the exchange is counted, and a step is sent."""
    job = job_of(exchange)
    model = build_model(job, Facts((SEQUENCE,), VOCABULARY, tokens=True))
    weights = list(model.parameters())
    with as_one_of(WORKERS):
        built = build_exchange(job.exchange, [Sum(dist.group.WORLD, weights, last=False)], [], None, 0)
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        built.begin(0, 1000)
        built.finish()
        built.settle(torch.zeros(()), 1, last=True)
        traffic = built.traffic()
        own = {weight.data_ptr() for weight in weights}
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(built, {})}
    held = built.held_bytes()
    assert sum(held.values()) == sum(size for address, size in storages.items() if address not in own)
    terms = asdict(predicted(job))
    for name, size in held.items():
        assert terms[name] == pytest.approx(size, rel=0.01), name
    assert all(held.get(name) for name in EXCHANGED if name != "making" and terms[name])
    work = decoder_of(job, VOCABULARY)
    assert work is not None and traffic is not None
    grid = Grid.of(make_plan(job, ANY_MACHINE).layout)
    sent = Agreement(job.exchange).sent(work, grid, style_of("bf16")) * work.parameters
    assert 2 * (WORKERS - 1) / WORKERS * float(sent) == pytest.approx(traffic.sent, rel=0.01)


EXCHANGED = ("buckets", "unsent", "codes", "making", "anchor", "outer", "travelling", "servers")


@pytest.mark.parametrize(
    ("exchange", "layout"),
    [
        ({"codec": "topk"}, {"replicate": 2, "tensor": 2}),
        ({"codec": "powersgd"}, {"shard": 2, "sharded": "optimizer", "tensor": 2}),
        ({"codec": "fp16"}, {"context": 2}),
        ({"codec": "int8"}, {"replicate": 2, "pipeline": 2}),
        ({}, {"shard": 4}),
        (LOCAL[2], {"replicate": 4}),
        (LOCAL[2], {"replicate": 1}),
    ],
    ids=str,
)
def test_a_dry_run_counts_the_same(exchange: dict[str, Any], layout: dict[str, int]) -> None:
    job = job_of(exchange, {**layout, "micro_batch": 1}, layers=4)
    chosen, facts = make_plan(job, ANY_MACHINE), Facts((SEQUENCE,), VOCABULARY, tokens=True)
    ranks = [
        chosen.layout.rank(chosen.layout.place(0)._replace(pipeline=stage)) for stage in range(chosen.layout.pipeline)
    ]
    counted = [dry_run(job, chosen, rank, facts).exchange for rank in ranks]
    terms = asdict(predicted(job))
    for name in set(EXCHANGED) - {"making"}:
        assert float(terms[name]) == pytest.approx(max(each.get(name, 0) for each in counted), rel=0.06), name


@pytest.mark.parametrize("setting", [{}, {"mode": "async"}, {"mode": "async", "compensation": 0.04}], ids=str)
def test_servers_hold_what_is_predicted(setting: dict[str, Any]) -> None:
    """As many gradients, or weights, as the desk keeps until an update."""
    job = job_of({"kind": "server", "servers": 2, **setting})
    size = 4.0 * sum(
        weight.numel() for weight in build_model(job, Facts((SEQUENCE,), VOCABULARY, tokens=True)).parameters()
    )
    here = predicted(job, on_gpu=False)
    copies = {0: WORKERS, 1: 0, 2: 2 * WORKERS}[len(setting)]
    assert float(here.servers) == pytest.approx((size * (1 + copies) + 2 * size) / WORKERS, rel=1e-3)
    assert float(here.travelling) == pytest.approx(size, rel=1e-3) and not here.optimizer
    beside = predicted(job)
    assert not beside.optimizer and not beside.servers and not beside.travelling, "they are in main memory"
    held = dry_run(job, make_plan(job, ANY_MACHINE), 0, Facts((SEQUENCE,), VOCABULARY, tokens=True))
    assert held.served == served(job.exchange, WORKERS, size, 2 * size) and not held.optimizer  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", [{}, {"mode": "async"}, {"mode": "async", "compensation": 0.04}], ids=str)
def test_a_desk_keeps_what_is_predicted(setting: dict[str, Any]) -> None:
    """A server of real workers on one machine, after some updates: what it had room for it keeps."""
    chosen, steps, workers, weight = Server(kind="server", **setting), 6, 3, torch.zeros(300, 100)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address: tuple[str, int] = free.getsockname()
    desk = Desk(address, "token", [weight], chosen)
    desk.open(0, Sync(0, steps, workers) if chosen.mode == "sync" else Async(0, steps, None))
    held: list[int] = []

    def work() -> None:
        own = {"w": nn.Parameter(weight.clone())}
        client = Client([address], "token", own, lambda: None)
        client.connect(20)
        ticket = client.ask(None)
        met.wait(20)
        while ticket.kind == "train":
            client.fetch(ticket)
            client.push(ticket)
            ticket = client.ask(ticket)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(client, {})}
        held.append(sum(storages.values()))
        client.close()

    met = threading.Barrier(workers)
    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    while desk.version < steps:
        update, _ = desk.next_update()
        if update:
            desk.publish(update, desk.take(update))
    kept = sum(tensor.nbytes for tensor in {id(t): t for flat in flats_of(desk) for t in [flat.bytes]}.values())
    desk.close(5.0, lambda: None)
    for thread in threads:
        thread.join(20)
    size = weight.nbytes
    most = served(chosen, workers, size, 0)
    if chosen.compensation is None:
        assert kept == pytest.approx(most, rel=0.01)
    else:  # by how many fetched at once
        assert 0.99 * (1 + workers) * size <= kept <= 1.01 * most
    assert held == pytest.approx([2 * size] * workers, rel=0.01), "the weights, and gradients on their way"


def flats_of(desk: Desk) -> list[Flat]:
    return [desk.weights, *desk._free, *desk._staged.values(), *desk._fetched.values()]


# --- time ------------------------------------------------------------------------------------------------------------

SLOW = Hardware(
    peak=5e10, bits=16, peak_16=5e10, memory=1e10, bandwidth=1e10, link=1e9, network=12.5e6, per_node=1, ahead=0
)
"""A core at 100 Mbit/s."""


def seconds(exchange: dict[str, Any], on: Hardware = SLOW, **changes: Any) -> Times:
    job = job_of(exchange)
    work, grid = decoder_of(job, VOCABULARY), Grid.of(Layout(replicate=WORKERS, micro_batch=2))
    assert work is not None
    agreement = replace(Agreement(job.exchange, on_gpu=False), **changes)
    return step_time(work, grid, 64, on, replace(fitted_rates(), network=1.0), style_of("fp32", False), agreement)


def test_a_code_saves_bytes_and_costs_passes() -> None:
    plain = seconds({})
    for codec, times in (("fp16", 2.0), ("int8", 3.9), ("onebit", 18.0)):
        coded = seconds({"codec": codec})
        assert 0.8 * times < plain.gradients / coded.gradients, codec
        assert coded.coding > 0 and coded.total < plain.total
        quick = replace(SLOW, link=1e12, per_node=WORKERS)
        assert seconds({"codec": codec}, quick).total > seconds({}, quick).total, "where bytes are cheap codes are not"
    half = seconds({"codec": "int8"}, plainly=0.5)
    assert half.coding == pytest.approx(seconds({"codec": "int8"}).coding / 2)
    assert seconds({"codec": "int8"}, plainly=1.0).gradients == pytest.approx(plain.gradients)


def test_local_steps_exchange_now_and_then_and_meanwhile() -> None:
    each, seldom = seconds({"kind": "local", "every": 1}), seconds({"kind": "local", "every": 16})
    assert each.gradients == pytest.approx(16 * seldom.gradients)
    meanwhile = seconds({"kind": "local", "every": 16, "overlap": 2})
    computing = seldom.total - seldom.gradients - seldom.spread
    assert seldom.gradients - meanwhile.gradients == pytest.approx(2 * computing / 16, rel=0.2)
    assert seconds({"kind": "local", "every": 16, "overlap": 16}, replace(SLOW, network=1e9)).gradients == 0
    assert seconds({"kind": "local", "codec": "int8"}).gradients < 0.3 * seldom.gradients


def test_servers_are_waited_for_or_work_meanwhile() -> None:
    """A server passes on all workers' gradients and weights, 100 Mbit/s each way; two share them out."""
    work = decoder_of(job_of({}), VOCABULARY)
    assert work is not None
    alone = 2 * WORKERS * 4 * float(work.parameters) / 12.5e6
    one, two = seconds({"kind": "server"}), seconds({"kind": "server", "servers": 2})
    assert one.gradients == pytest.approx(alone) and two.gradients == pytest.approx(alone / 2)
    late = seconds({"kind": "server", "mode": "async"})
    assert late.gradients < one.gradients / 3
    quick = replace(SLOW, network=1e9, peak=1e9, peak_16=1e9)
    hidden = seconds({"kind": "server", "mode": "async"}, quick)
    assert hidden.gradients < 0.1 * seconds({"kind": "server"}, quick).gradients and not hidden.optimizer
    bounded = seconds({"kind": "server", "mode": "async", "staleness": 1}, quick)
    assert bounded.total == pytest.approx(2 * hidden.total, rel=0.1), "two of four may be under way"


# --- layouts ---------------------------------------------------------------------------------------------------------

CPUS = Machine("", cores=4, memory=2**40, gpus=(), bf16=False)
AGREEING = [
    {"codec": "int8"}, {"codec": "onebit"}, {"algorithm": "tree"}, {"balance": True}, *LOCAL, {"kind": "server"},
    {"kind": "server", "mode": "async"},
]  # fmt: skip


@pytest.mark.parametrize("exchange", AGREEING, ids=str)
def test_every_layout_that_is_found_is_one_that_is_run(exchange: dict[str, Any]) -> None:
    job = job_of(exchange, {"recompute": "none"}, hidden=1024, layers=8)
    work = decoder_of(job, VOCABULARY)
    assert work is not None
    wanted = replace(wanted_of(job, work, 1e6), quota=32)
    found = search(wanted, [offer(), offer("V100-16GB", link=1e11)]).prospects
    assert max(each.layout.workers for each in found) > 1
    for each in found:
        machine = Machine("", 64, 2**40, ("H100",) * each.layout.workers, bf16=each.precision == "bf16", fp8=True)
        assert not misfits(job, each.layout), str(each.layout)
        assert make_plan(job, machine, layout=each.layout).precision == each.precision
    for workers in (1, 2, 4):  # as `layout: auto` looks for them
        grid = layouts_for(wanted, workers)
        chosen = {layout_of(one) for one in rows_of(grid, list(range(len(grid.tensor))))}
        assert chosen and all(make_plan(job, CPUS, layout=layout) for layout in chosen)


def test_what_gpus_lack_is_not_planned_for_them(tmp_path: Path) -> None:
    def refused(exchange: dict[str, Any], *settings: str) -> str:
        job = write_job(tmp_path, {**dump(job_of({}, {"recompute": "none"})), "exchange": exchange})
        with pytest.raises(JobError) as error:
            plan(job, settings=settings)
        return str(error.value)

    assert "hierarchical is for CPUs" in refused({"algorithm": "hierarchical"})
    old = refused({"kind": "local"}, "limits.gpus=V100-16GB")
    assert "train.precision bf16: none of these GPUs computes in it" in old


# --- words -----------------------------------------------------------------------------------------------------------


def test_an_exchange_is_said_as_a_job_file_has_it() -> None:
    assert not str(PLAIN)
    said = {
        "allreduce, codec int8": {"codec": "int8"},
        "allreduce, codec topk, warmup 0%, part 0.1": {"codec": {"name": "topk", "part": 0.1, "warmup": "0%"}},
        "local, every 16": {"kind": "local"},
        "local, every 4, outer (lr 0.7, momentum 0.9, nesterov)": {
            "kind": "local", "every": 4, "outer": {"lr": 0.7, "momentum": 0.9, "nesterov": True},
        },
        "server, servers 2, mode async": {"kind": "server", "servers": 2, "mode": "async"},
        "allreduce, balance": {"balance": True},
    }  # fmt: skip
    for words, exchange in said.items():
        setting = Job.model_validate({**dump(job_of({})), "exchange": exchange}).exchange
        assert str(Agreement(setting)) == words


def test_what_does_not_fit_is_named() -> None:
    def check(exchange: dict[str, Any], gigabytes: float = 10.0) -> None:
        machine = Machine("small", cores=4, memory=int(gigabytes * 1e9), gpus=(), bf16=False)
        job = job_of(exchange, {"replicate": 2, "micro_batch": 1}, hidden=1024, layers=12)
        work = decoder_of(job, VOCABULARY)
        assert work is not None
        Here(machine).refuse_if_too_large(wanted_of(job, work, 1e4), Layout(replicate=2, micro_batch=1), "fp32")

    check({})
    check({"kind": "local"})
    outer = {"momentum": 0.9, "nesterov": True}
    with pytest.raises(ValueError, match=r"unsent [\d.]+.* anchor .* outer .* travelling .*it fits with exchange.kind"):
        check({"kind": "local", "overlap": 1, "outer": outer, "codec": "onebit"})
    check({"kind": "server"})
    with pytest.raises(ValueError, match=r"servers [\d.]+"):
        check({"kind": "server"}, 6.0)


def test_the_commands_say_it(tmp_path: Path) -> None:
    exchange = {"kind": "local", "every": 8, "codec": "int8"}
    values = dump(job_of({}, {"replicate": 8}, layers=16, hidden=2048, heads=16))
    job = write_job(tmp_path, {**values, "exchange": exchange})
    done = slipstream("plan", job, "--explain", "--save", "plan.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "exchange: local, every 8, codec int8" in done.stdout and "anchor" in done.stdout, done.stdout
    assert "exchange: local, every 8" in (tmp_path / "plan.yaml").read_text()
    dry = slipstream("train", job, "--dry-run", cwd=tmp_path)
    assert dry.returncode == 0 and "anchor" in dry.stdout and "unsent" not in dry.stdout, dry.stdout + dry.stderr
