"""4. The loop, precision, checkpoints; how the model is split, how gradients agree, and what is trained."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _AlsoTheFunction(ModuleType):
    """`slipstream.train` is this folder and also the function that trains a job: so the folder can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return import_module("slipstream.api").train(*args, **kwargs)


sys.modules[__name__].__class__ = _AlsoTheFunction
