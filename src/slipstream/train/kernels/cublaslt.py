"""Products in bf16 with what follows them, by cuBLASLt. torch calls that library too, but not for what is here: an
activation in the product's own kernel that keeps what backward needs, and the quickest of the ways that it proposes,
found by measuring once. Where rows are short (768), the first one is 8 to 10% slower than the best on an H200.
"""

import ctypes
from contextlib import suppress
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from slipstream.train.kernels.clock import quickest

PLAIN, GELU, GELU_BACKWARD, BIAS = 1, 160, 192, 4
"""Of `cublasLtEpilogue_t`: nothing; GELU by tanh, what it takes being kept; times its derivative at what was kept; and,
to be added to GELU's, a bias before it."""
_KEEPS = GELU & GELU_BACKWARD
_BF16, _FP32, _SUMS_IN_FP32 = 14, 0, 68  # cudaDataType_t, cublasComputeType_t
_TURN_LEFT, _EPILOGUE, _BIAS, _KEPT, _KEPT_WIDTH = 3, 7, 8, 11, 12  # cublasLtMatmulDescAttributes_t
_WORKSPACE = 1  # cublasLtMatmulPreferenceAttributes_t
_WORKSPACE_BYTES = 32 * 2**20
_WAYS, _TRIES = 8, 3
_EVEN, _ALIGNED = 8, 256
"""Sizes are multiples of the first, and addresses, in bytes, of the second."""
_ONE, _ZERO = c_float(1.0), c_float(0.0)


class _Way(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`: how to compute a product; eight words say it, the rest is about them."""

    _fields_ = (
        ("words", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@cache
def _library() -> ctypes.CDLL | None:
    if not torch.version.cuda:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None


def _takes(x: Tensor, weight: Tensor) -> bool:
    """Whether it is here and multiplies such tensors: bf16 on a GPU, row after row, beginning where it expects."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or weight.dtype != x.dtype or _library() is None:
        return False
    return all(
        t.is_contiguous() and not (t.shape[0] | t.shape[1]) % _EVEN and not t.data_ptr() % _ALIGNED for t in (x, weight)
    )


def _call(name: str, *values: Any) -> None:
    if status := getattr(_library(), f"cublasLt{name}")(*values):
        raise RuntimeError(f"cublasLt{name} gave status {status}")


@cache
def _handle(device: torch.device) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _call("Create", byref(handle))
    return handle


@cache
def _workspace(device: torch.device, _stream: int) -> Tensor:
    """Of each stream its own: kernels of two may run at a time."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _layout(rows: int, columns: int) -> c_void_p:
    """Of a matrix by columns."""
    layout = c_void_p()
    _call("MatrixLayoutCreate", byref(layout), _BF16, c_uint64(rows), c_uint64(columns), c_int64(rows))
    return layout


class _Product:
    """Of matrices of these sizes. To the library they are by columns, so that each is the transpose of ours."""

    def __init__(
        self, columns: int, rows: int, inner: int, turned: bool, epilogue: int, fixed: bool, device: torch.device
    ) -> None:
        self._fixed, self._device, self._says = fixed, device, c_void_p()
        _call("MatmulDescCreate", byref(self._says), _SUMS_IN_FP32, _FP32)
        self._say(_TURN_LEFT, c_int(turned))
        self._say(_EPILOGUE, c_int(epilogue))
        if epilogue & _KEEPS:
            self._say(_KEPT_WIDTH, c_int64(columns))
        self._left = _layout(inner, columns) if turned else _layout(columns, inner)
        self._right, self._out = _layout(inner, rows), _layout(columns, rows)
        self._best: list[_Way] | None = None
        """One way, or none where the library has none; not known before the first product."""

    def _say(self, attribute: int, value: Any) -> None:
        _call("MatmulDescSetAttribute", self._says, attribute, byref(value), c_size_t(ctypes.sizeof(value)))

    def run(self, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, kept: Tensor | None) -> bool:
        """Fill `out`, and say whether there was a way to."""
        if bias is not None:
            self._say(_BIAS, c_void_p(bias.data_ptr()))
        if kept is not None:
            self._say(_KEPT, c_void_p(kept.data_ptr()))
        if self._best is None:
            self._best = self._choose(x, weight, out)
        for way in self._best:
            self._launch(way, x, weight, out)
        return bool(self._best)

    def _choose(self, *tensors: Tensor) -> list[_Way]:
        """The quickest of the ways that work; where no clock may decide, the first of them."""
        took: list[tuple[float, _Way]] = []
        for way in self._ways():
            with suppress(RuntimeError):  # some are proposed, and then refused
                took.append((quickest(partial(self._launch, way, *tensors), _TRIES), way))
        best = took[:1] if self._fixed else sorted(took, key=lambda found: found[0])[:1]
        return [way for _, way in best]

    def _launch(self, way: _Way, x: Tensor, weight: Tensor, out: Tensor) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        space, into = _workspace(self._device, stream), c_void_p(out.data_ptr())
        _call(
            "Matmul", _handle(self._device), self._says,
            byref(_ONE), c_void_p(weight.data_ptr()), self._left, c_void_p(x.data_ptr()), self._right,
            byref(_ZERO), into, self._out, into, self._out,
            byref(way), c_void_p(space.data_ptr()), c_size_t(_WORKSPACE_BYTES), c_void_p(stream),
        )  # fmt: skip

    def _ways(self) -> list[_Way]:
        found, count, wish = (_Way * _WAYS)(), c_int(), c_void_p()
        _call("MatmulPreferenceCreate", byref(wish))
        _call("MatmulPreferenceSetAttribute", wish, _WORKSPACE, byref(c_size_t(_WORKSPACE_BYTES)), c_size_t(8))
        sizes = self._left, self._right, self._out, self._out
        with suppress(RuntimeError):  # not every GPU and version has every product
            _call("MatmulAlgoGetHeuristic", _handle(self._device), self._says, *sizes, wish, _WAYS, found, byref(count))
        _call("MatmulPreferenceDestroy", wish)
        return [way for way in found[: count.value] if way.status == 0]


_product = cache(_Product)


def multiply(
    x: Tensor,
    weight: Tensor,
    turned: bool,
    epilogue: int = PLAIN,
    bias: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor | None:
    """x [n, k] times the transpose of weight [m, k], or `turned` being false times weight [k, m]; all in bf16. None
    where that cannot be had here, or not of such tensors."""
    assert bias is None or epilogue == GELU, "no other takes one"
    if not _takes(x, weight):
        return None
    columns = weight.shape[0] if turned else weight.shape[1]
    out = torch.empty((len(x), columns), dtype=x.dtype, device=x.device)
    fixed = torch.are_deterministic_algorithms_enabled()
    product = _product(columns, *x.shape, turned, epilogue | (BIAS if bias is not None else 0), fixed, x.device)
    return out if product.run(x, weight, out, bias, kept) else None
