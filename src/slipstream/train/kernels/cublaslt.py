"""Products in bf16 by cuBLASLt. torch calls that library too, but not for what is here: of the ways that it proposes
the quickest, found by measuring once; an activation in the product's own kernel that keeps what backward needs;
something to be added there; sums in fp32 that are not rounded on their way out.

The first way that it proposes, which torch takes, is behind the best by 3% for llama-1b's products on an H200, and by 8
to 10% where rows are short (768).
"""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache, partial
from typing import Any, NamedTuple, cast

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
_DEVICE = "cuda"
"""The kind of device that it computes on."""
_EVEN, _ALIGNED = 8, 256
"""Sizes are multiples of the first, and addresses, in bytes, of the second."""
_ONE, _ZERO = c_float(1.0), c_float(0.0)
_stream_of: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""A GPU's number to its stream; `torch.cuda.current_stream` takes thirty times as long."""


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


class _Matrix(NamedTuple):
    """How one is given."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _turned(matrix: _Matrix) -> bool | None:
    """Whether it lies in memory as its transpose; none where it lies in neither way, or is of other sizes."""
    rows, columns = matrix.shape
    if (rows | columns) % _EVEN or matrix.stride not in ((columns, 1), (1, rows)):
        return None
    return matrix.stride == (1, rows)


def _call(name: str, *values: Any) -> None:
    if status := getattr(_library(), f"cublasLt{name}")(*values):
        raise RuntimeError(f"cublasLt{name} gave status {status}")


@cache
def _matmul() -> Callable[..., int]:
    """The function that launches a product. Its numbers need no wrapping: a block calls it a dozen times, and that must
    not take the processor longer than the GPU."""
    function = getattr(_library(), "cublasLtMatmul")  # noqa: B009
    function.argtypes = (*[c_void_p] * 14, c_size_t, c_void_p)
    return cast(Callable[..., int], function)


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
        stream: int = _stream_of(self._device.index)
        space, into = _workspace(self._device, stream).data_ptr(), out.data_ptr()
        added, factor = (into, _ZERO) if onto is None else (onto.data_ptr(), _ONE)
        status = _matmul()(
            _handle(self._device), self._says,
            byref(_ONE), b.data_ptr(), self._left, a.data_ptr(), self._right,
            byref(factor), added, self._out, into, self._out,
            byref(way), space, _WORKSPACE_BYTES, stream,
        )  # fmt: skip
        if status:
            raise RuntimeError(f"cublasLtMatmul gave status {status} for {self._shape}")

    def _ways(self) -> list[_Way]:
        found, count, wish = (_Way * _WAYS)(), c_int(), c_void_p()
        _call("MatmulPreferenceCreate", byref(wish))
        _call("MatmulPreferenceSetAttribute", wish, _WORKSPACE, byref(c_size_t(_WORKSPACE_BYTES)), c_size_t(8))
        sizes = self._left, self._right, self._out, self._out
        with suppress(RuntimeError):  # not every GPU and version has every product
            _call("MatmulAlgoGetHeuristic", _handle(self._device), self._says, *sizes, wish, _WAYS, found, byref(count))
        _call("MatmulPreferenceDestroy", wish)
        return [way for way in found[: count.value] if way.status == 0]


@cache
def _product(
    device: torch.device, a: _Matrix, b: _Matrix, dtype: torch.dtype, epilogue: int, fixed: bool
) -> _Product | None:
    """Of such matrices; none where the library is not here, or has no quick ways for them."""
    left, right = _turned(a), _turned(b)
    in_bf16 = a.dtype == b.dtype == torch.bfloat16 and dtype in _TYPES
    if left is None or right is None or not in_bf16 or _library() is None:
        return None
    (rows, inner), (_, columns) = a.shape, b.shape
    return _Product(_Shape(rows, columns, inner, (left, right), dtype, epilogue), fixed, device)


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
    """a [n, k] times b [k, m], both in bf16, as fp32 or bf16, with a bias for each row of that kind; added `onto`
    something of that kind, which may be `out`, where it is written. None where that cannot be had here, or not of such
    tensors."""
    assert bias is None or epilogue != GELU_BACKWARD, "that takes none"
    if a.device.type != _DEVICE or any(t is not None and not _is_plain(t, dtype) for t in (bias, onto)):
        return None
    left, right = (_Matrix(t.shape, t.stride(), t.dtype) for t in (a, b))
    kind, fixed = epilogue | (0 if bias is None else _BIAS_FIRST), torch.are_deterministic_algorithms_enabled()
    product = _product(a.device, left, right, dtype, kind, fixed)
    if product is None or (a.data_ptr() | b.data_ptr() | (0 if onto is None else onto.data_ptr())) % _ALIGNED:
        return None
    out = torch.empty((len(a), b.shape[1]), dtype=dtype, device=a.device) if out is None else out
    return out if product.run(a, b, out, onto, bias, kept) else None


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the library may take it for one that is like what comes out."""
    return tensor.dtype == dtype and tensor.is_contiguous()
