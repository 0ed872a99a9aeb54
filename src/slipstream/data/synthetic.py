"""Seeded synthetic regression: y = x·w + noise."""

import numpy as np

from slipstream.data.arrays import Arrays
from slipstream.data.base import Dataset
from slipstream.job import Job
from slipstream.job.data import SyntheticData


def open_synthetic(data: SyntheticData, job: Job) -> Dataset:
    random = np.random.default_rng(job.seed)
    weights = random.standard_normal((data.inputs, data.outputs))
    inputs = random.standard_normal((data.samples, data.inputs), dtype=np.float32)
    noise = data.noise * random.standard_normal((data.samples, data.outputs))
    # einsum in float64, not `@`: a BLAS adds in an order that depends on its number of threads, and so on the layout.
    targets = np.einsum("ni,io->no", inputs, weights) + noise
    return Arrays(inputs, targets.astype(np.float32), data.outputs)
