"""A worker of Slipstream's servers that computes nothing: it sends gradients, and fetches weights if it is told to.

RUN RANK PULSE ROUNDS FETCH; it waits for a line on its standard input before the rounds that count.
"""

import sys
import time
from pathlib import Path

import torch
import yaml

from slipstream.job import load_job
from slipstream.plan import Plan
from slipstream.runs import Pulse, RunFolder
from slipstream.train.server.addresses import addresses, token
from slipstream.train.server.client import Client
from slipstream.train.server.work import Hand


def main() -> None:
    run, rank, rounds, fetch = RunFolder(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4]), sys.argv[5] == "fetch"
    plan = Plan.model_validate(yaml.safe_load(run.plan.read_text()))
    torch.set_num_threads(plan.threads)
    pulse = Pulse(Path(sys.argv[3]), rank)
    weights = Hand(load_job(run.job), plan, rank, pulse).weights()
    gradients = [torch.full_like(weight, 1e-6) for weight in weights.values()]
    client = Client(addresses(1), token(), weights, pulse.beat)
    client.connect(60)
    ticket = client.ask(None)
    for number in range(-2, rounds):
        if number == 0:
            print("ready", flush=True)
            sys.stdin.readline()
            began = time.time()
        if fetch:
            client.fetch(ticket)
        for weight, gradient in zip(weights.values(), gradients, strict=True):
            weight.grad = gradient
        client.push(ticket)
        ticket = client.ask(ticket, 1.0, 1.0)
    print(began, time.time(), flush=True)


if __name__ == "__main__":
    main()
