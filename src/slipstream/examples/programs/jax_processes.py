"""A plain JAX script of several processes, which are told who they are by JAX's own variables.

slipstream submit jax_processes.py --on local --workers 2
"""

import os

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    os.environ["JAX_COORDINATOR_ADDRESS"], int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
)

key = jax.random.fold_in(jax.random.key(0), jax.process_index())
inputs = jax.random.normal(key, (256, 8))
targets = inputs @ jnp.arange(8.0)
weight = jnp.zeros(8)
gradient = jax.jit(jax.value_and_grad(lambda weight: jnp.mean((inputs @ weight - targets) ** 2)))
for step in range(1, 51):
    loss, slope = gradient(weight)
    everywhere = multihost_utils.process_allgather(jnp.concatenate([slope, loss[None]])).mean(axis=0)
    weight = weight - 0.05 * everywhere[:-1]
    if jax.process_index() == 0 and step % 10 == 0:
        print(f"step {step}: loss {everywhere[-1]:.6f} on {jax.process_count()} processes", flush=True)
