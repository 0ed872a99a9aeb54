"""A parameter server as Ray's documentation builds it: an actor with the weights, and two actors that work for it.

NUMBERS ROUNDS FETCH. The update is plain gradient descent in numpy, in place.
"""

import sys
import time
from typing import Any

import numpy as np
import ray


@ray.remote(num_cpus=0)
class Server:
    def __init__(self, numbers: int) -> None:
        self.weights = np.zeros(numbers, dtype=np.float32)

    def push(self, gradient: Any) -> None:
        self.weights -= 0.01 * gradient

    def fetch(self) -> Any:
        return self.weights


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self, server: Any, numbers: int) -> None:
        self.server, self.gradient = server, np.full(numbers, 1e-6, dtype=np.float32)

    def work(self, rounds: int, fetch: bool) -> None:
        for _ in range(rounds):
            if fetch:
                ray.get(self.server.fetch.remote())
            ray.get(self.server.push.remote(self.gradient))


def main() -> None:
    numbers, rounds, fetch = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "fetch"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    server = Server.remote(numbers)
    workers = [Worker.remote(server, numbers) for _ in range(2)]
    ray.get([worker.work.remote(2, fetch) for worker in workers])
    began = time.perf_counter()
    ray.get([worker.work.remote(rounds, fetch) for worker in workers])
    print(2 * rounds / (time.perf_counter() - began))
    ray.shutdown()


if __name__ == "__main__":
    main()
