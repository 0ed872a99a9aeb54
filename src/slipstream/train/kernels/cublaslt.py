"""Products in bf16 by cuBLASLt. torch calls that library too, but not for what is here: of the ways that it proposes
the quickest, found by measuring once; an activation in the product's own kernel that keeps what backward needs;
something to be added there; sums in fp32 that are not rounded on their way out.

The first way that it proposes, which torch takes, is behind the best by 3% for llama-1b's products on an H200, and by 8
to 10% where rows are short (768).
"""

import ctypes
from contextlib import suppress
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.train.kernels.clock import quickest
from slipstream.train.kernels.remembered import remembered

PLAIN, GELU, GELU_BACKWARD, _BIAS_FIRST = 0, 160, 192, 4
"""Of `cublasLtEpilogue_t`: nothing; GELU by tanh, what it takes being kept; times its derivative at what was kept; and,
to be added to the first two, a bias before it."""
_DEFAULT, _KEEPS = 1, GELU & GELU_BACKWARD
_TYPES = {torch.bfloat16: 14, torch.float32: 0}  # cudaDataType_t
_FP32, _SUMS_IN_FP32 = 0, 68  # cudaDataType_t, cublasComputeType_t
_TURN_LEFT, _TURN_RIGHT, _EPILOGUE, _BIAS, _KEPT, _KEPT_WIDTH = 3, 4, 7, 8, 11, 12  # cublasLtMatmulDescAttributes_t
_WORKSPACE = 1  # cublasLtMatmulPreferenceAttributes_t
_WORKSPACE_BYTES = 32 * 2**20
_WAYS, _TRIES = 8, 5
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


class _Shape(NamedTuple):
    """What is multiplied: [rows, inner] by [inner, columns]."""

    rows: int
    columns: int
    inner: int
    turned: tuple[bool, bool]
    """Whether either lies in memory as its transpose."""
    dtype: torch.dtype
    """Of what comes out."""
    epilogue: int


@cache
def _library() -> ctypes.CDLL | None:
    if not torch.version.cuda:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None


def _version() -> int:
    version = getattr(_library(), "cublasLtGetVersion")  # noqa: B009  (of a library, not of its wrapper)
    version.restype = c_size_t
    return int(version())


def _takes(*matrices: Tensor) -> bool:
    """Whether it is here and multiplies such matrices: bf16 on a GPU, beginning where it expects."""
    if _library() is None or any(not t.is_cuda or t.dtype != torch.bfloat16 for t in matrices):
        return False
    return all(_lies(t) and not (t.shape[0] | t.shape[1]) % _EVEN and not t.data_ptr() % _ALIGNED for t in matrices)


def _lies(matrix: Tensor) -> bool:
    """Row after row, or column after column."""
    return matrix.is_contiguous() or matrix.T.is_contiguous()


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


def _layout(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> c_void_p:
    """Of a matrix by columns."""
    layout = c_void_p()
    _call("MatrixLayoutCreate", byref(layout), _TYPES[dtype], c_uint64(rows), c_uint64(columns), c_int64(rows))
    return layout


class _Product:
    """Of matrices of one shape. To the library they are by columns, so that each is the transpose of ours, and the
    second comes first."""

    def __init__(self, shape: _Shape, fixed: bool, device: torch.device) -> None:
        self._shape, self._fixed, self._device, self._says = shape, fixed, device, c_void_p()
        _call("MatmulDescCreate", byref(self._says), _SUMS_IN_FP32, _FP32)
        rows, columns, inner, (right, left), dtype, epilogue = shape
        self._say(_TURN_LEFT, c_int(left))
        self._say(_TURN_RIGHT, c_int(right))
        self._say(_EPILOGUE, c_int(epilogue or _DEFAULT))
        if epilogue & _KEEPS:
            self._say(_KEPT_WIDTH, c_int64(columns))
        self._left = _layout(inner, columns) if left else _layout(columns, inner)
        self._right = _layout(rows, inner) if right else _layout(inner, rows)
        self._out = _layout(columns, rows, dtype)
        self._best: list[_Way] | None = None
        """One way, or none where the library has none; not known before the first product."""

    def _say(self, attribute: int, value: Any) -> None:
        _call("MatmulDescSetAttribute", self._says, attribute, byref(value), c_size_t(ctypes.sizeof(value)))

    def run(
        self, a: Tensor, b: Tensor, out: Tensor, onto: Tensor | None, bias: Tensor | None, kept: Tensor | None
    ) -> bool:
        """Fill `out`, and say whether there was a way to."""
        if bias is not None:
            self._say(_BIAS, c_void_p(bias.data_ptr()))
        if kept is not None:
            self._say(_KEPT, c_void_p(kept.data_ptr()))
        if self._best is None:
            self._best = self._choose(a, b, torch.empty_like(out) if onto is out else out)
        for way in self._best:
            self._launch(way, a, b, out, onto)
        return bool(self._best)

    def _choose(self, *tensors: Tensor) -> list[_Way]:
        """The best of the ways that work; where no clock may decide, the first of them."""
        if self._fixed:
            return [way for way, _ in self._working(*tensors)][:1]
        name, version = torch.cuda.get_device_name(self._device), _version()
        what = f"{name}, cuBLASLt {version}, {self._shape}"
        words = remembered("fastest-products", what, lambda: self._measure(*tensors))
        return [_Way(words=(c_uint64 * 8)(*words))] if words else []

    def _measure(self, *tensors: Tensor) -> list[int]:
        """The words of the best way, or none."""
        took = self._working(*tensors)
        return list(min(took, key=lambda found: found[1])[0].words) if took else []

    def _working(self, *tensors: Tensor) -> list[tuple[_Way, float]]:
        """The ways that are not refused, and the milliseconds that each takes."""
        took: list[tuple[_Way, float]] = []
        for way in self._ways():
            with suppress(RuntimeError):  # some are proposed, and then refused
                took.append((way, quickest(partial(self._launch, way, *tensors), _TRIES)))
        return took

    def _launch(self, way: _Way, a: Tensor, b: Tensor, out: Tensor, onto: Tensor | None = None) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        space, into = _workspace(self._device, stream), c_void_p(out.data_ptr())
        added, factor = (into, _ZERO) if onto is None else (c_void_p(onto.data_ptr()), _ONE)
        _call(
            "Matmul", _handle(self._device), self._says,
            byref(_ONE), c_void_p(b.data_ptr()), self._left, c_void_p(a.data_ptr()), self._right,
            byref(factor), added, self._out, into, self._out,
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
    a: Tensor,
    b: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    onto: Tensor | None = None,
    out: Tensor | None = None,
    epilogue: int = PLAIN,
    bias: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor | None:
    """a [n, k] times b [k, m], both in bf16, as fp32 or bf16; added `onto` something of that kind, which may be `out`,
    where it is written. None where that cannot be had here, or not of such tensors."""
    assert bias is None or epilogue != GELU_BACKWARD, "that takes none"
    if dtype not in _TYPES or not _takes(a, b) or not (onto is None or onto.is_contiguous()):
        return None
    turned = (not a.is_contiguous(), not b.is_contiguous())
    shape = _Shape(len(a), b.shape[1], b.shape[0], turned, dtype, epilogue | (0 if bias is None else _BIAS_FIRST))
    out = torch.empty((len(a), b.shape[1]), dtype=dtype, device=a.device) if out is None else out
    fixed = torch.are_deterministic_algorithms_enabled()
    return out if _product(shape, fixed, a.device).run(a, b, out, onto, bias, kept) else None
