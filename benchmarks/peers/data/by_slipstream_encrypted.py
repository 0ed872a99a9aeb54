"""Slipstream on an encrypted dataset, whose key the environment has."""

from functools import partial

import by_slipstream

import slipstream.data.aes  # noqa: F401  (time runs when all is imported)

Loader = by_slipstream.Loader
write = partial(by_slipstream.write, encrypt=True)
