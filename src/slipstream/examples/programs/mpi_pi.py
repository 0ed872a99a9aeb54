"""A plain mpi4py script: pi by random points, each rank some of them.

slipstream submit mpi_pi.py --on local --workers 2 --mpi
"""

import random

from mpi4py import MPI

world = MPI.COMM_WORLD
draw = random.Random(world.rank)
POINTS = 200_000
inside = sum(draw.random() ** 2 + draw.random() ** 2 < 1 for _ in range(POINTS))
total = world.allreduce(inside)
if world.rank == 0:
    print(f"pi is about {4 * total / POINTS / world.size:.3f}, by {world.size} ranks", flush=True)
