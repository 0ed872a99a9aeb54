"""What is between the workers: how quick the links between machines are."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.job import Job
from slipstream.job.exchange import Local, Summing
from slipstream.plan import Network, Plan
from slipstream.runs import RunFolder, write_yaml
from slipstream.train.exchange.adding import ALGORITHMS
from slipstream.train.exchange.adding.choose import choose
from slipstream.train.exchange.adding.links import Links, segments, wait_for
from slipstream.train.exchange.adding.timing import seconds_of, time_ways, trials_of
from slipstream.train.exchange.allreduce import fill_buckets
from slipstream.train.nodes import nodes_of
from slipstream.train.world import World

_LARGE = 2**21
"""Bytes of a large message."""
_ROUNDS = 6


def know_network(
    job: Job,
    plan: Plan,
    run: RunFolder,
    world: World,
    weights: list[nn.Parameter],
    steps: int,
    goes_on: Callable[[], bool],
) -> Plan:
    """The plan with what the exchange of these weights' gradients, in so many steps, must know of the network. It is
    learned once, and kept in the run's plan; if somebody wishes to stop before it is, a resume learns it."""
    setting = job.exchange
    if not isinstance(setting, Summing) or setting.algorithm not in ("auto", "hierarchical"):
        return plan
    if plan.network or world.size == 1 or plan.device != "cpu" or plan.layout.shares_weights:
        return plan
    network = measure(nodes_of(world.size))
    if setting.algorithm == "auto" and setting.codec is None and network.latency:
        buckets = fill_buckets(weights, setting.bucket, lambda _: False)
        sizes = [sum(weight.nbytes for weight in bucket) for bucket in buckets]
        turns = steps / setting.every if isinstance(setting, Local) else steps
        trials = trials_of(sizes, turns, network)
        seconds = seconds_of(trials, network)
        if world.rank == 0:
            run.event("network", latency=network.latency, bandwidth=network.bandwidth, seconds=seconds)
        sums = time_ways(network, ALGORITHMS, trials, goes_on)
        if sums is None:
            return plan
        network = network.model_copy(update={"sums": sums})
        if world.rank == 0:
            run.event("adding up", ways={size: choose(size, network.nodes, network) for size in trials})
    plan = plan.model_copy(update={"network": network})
    if world.rank == 0:
        write_yaml(run.plan, plan.model_dump(mode="json"))
    return plan


def measure(nodes: tuple[int, ...]) -> Network:
    """Each worker sends to the next, all at once: what the slowest link between machines does. All must call it."""
    if len(set(nodes)) == 1:
        return Network(nodes=nodes)
    group = dist.group.WORLD
    assert group is not None, "there are several workers"
    links = Links(group, nodes)
    small, large = _there_and_back(links, torch.zeros(1)), _there_and_back(links, torch.zeros(_LARGE // 4))
    counts = nodes[links.rank] != nodes[(links.rank + 1) % links.size]
    slowest = torch.tensor([small, large - small], dtype=torch.float64) * counts
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    back_and_forth, longer = slowest.tolist()
    return Network(nodes=nodes, latency=back_and_forth / 2, bandwidth=_LARGE / max(1e-9, longer))


def _there_and_back(links: Links, message: Tensor) -> float:
    """Seconds until the next worker has a message and this one its short answer; of some rounds the best. Receives are
    posted before, as the algorithms do."""
    before, following = (links.rank - 1) % links.size, (links.rank + 1) % links.size
    into, answer = torch.empty_like(message), torch.empty(1)
    arriving = [[links.receive(part, before) for part in segments(into)] for _ in range(_ROUNDS)]
    answers = [links.receive(answer, following, stream=1) for _ in range(_ROUNDS)]
    dist.barrier()
    seconds = []
    for works, answered in zip(arriving, answers, strict=True):
        began = time.perf_counter()
        sent = [links.send(part, following) for part in segments(message)]
        wait_for(works)
        sent.append(links.send(message[:1], before, stream=1))
        answered.wait()
        seconds.append(time.perf_counter() - began)
        wait_for(sent)
    return min(seconds)
