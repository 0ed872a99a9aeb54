"""Slipstream on an encrypted dataset, whose key the environment has."""

from functools import partial

import by_slipstream

Loader = by_slipstream.Loader
write = partial(by_slipstream.write, encrypt=True)
