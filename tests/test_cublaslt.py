"""Products by cuBLASLt, called as on a GPU: the library is ours, and computes what it is asked for on a CPU."""

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.train.kernels import cublaslt, gelu, products, rotary, swiglu

SOURCE = Path(__file__).parent / "cublaslt.cpp"
EIGHTS = st.integers(1, 6).map(lambda count: 8 * count)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    made = tmp_path_factory.mktemp("library") / "cublaslt.so"
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", str(made), str(SOURCE)], check=True)
    return ctypes.CDLL(str(made))


@pytest.fixture(autouse=True)
def _called(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the place of the GPU's, for tensors of a CPU; what is found is not kept."""
    handle = ctypes.c_void_p()
    library.cublasLtCreate(ctypes.byref(handle))
    for name, stand_in in (
        ("_library", lambda: library),
        ("_DEVICE", "cpu"),
        ("_ALIGNED", 64),  # as torch gives memory on a CPU
        ("_handle", lambda _device: handle),
        ("_stream_of", lambda _number: 0),
        ("quickest", lambda launch, _tries: launch() or 1.0),
        ("remembered", lambda _kind, _what, measure: measure()),
    ):
        monkeypatch.setattr(cublaslt, name, stand_in)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "none")
    caches = (cublaslt._product, cublaslt._matmul, cublaslt._workspace)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def random(*shape: int, seed: int, turned: bool = False) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    made = torch.randn(shape[::-1] if turned else shape, generator=draw).bfloat16()
    return made.T if turned else made


def close(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == dtype
    assert (ours.double() - exact).norm() <= (1e-5 if dtype == torch.float32 else 4e-3) * exact.norm()


@given(
    rows=EIGHTS,
    inner=EIGHTS,
    columns=EIGHTS,
    turned=st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from((torch.bfloat16, torch.float32)),
    adds=st.sampled_from(("nothing", "bias", "onto", "in place")),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_products_of_any_kind(rows, inner, columns, turned, dtype, adds, seed) -> None:
    a, b = random(rows, inner, seed=seed, turned=turned[0]), random(inner, columns, seed=seed + 1, turned=turned[1])
    exact = a.double() @ b.double()
    bias = random(columns, seed=seed + 2).to(dtype) if adds == "bias" else None
    onto = random(rows, columns, seed=seed + 3).to(dtype) if adds in ("onto", "in place") else None
    if bias is not None:
        exact += bias
    if onto is not None:
        exact += onto
    for _ in range(2):  # the second time what was found is known
        target = onto.clone() if adds == "in place" and onto is not None else None
        made = cublaslt.multiply(a, b, dtype, onto=onto if target is None else target, out=target, bias=bias)
        assert made is not None and (target is None or made is target)
        close(made, exact, dtype)


def test_what_the_library_has_no_quick_way_for_is_left_to_torch() -> None:
    even, odd = random(16, 24, seed=0), random(24, 12, seed=1)
    assert cublaslt.multiply(even, random(24, 16, seed=1)) is not None
    assert cublaslt.multiply(even, odd) is None
    assert cublaslt.multiply(even.float(), random(24, 16, seed=1)) is None
    assert cublaslt.multiply(random(16, 48, seed=0)[:, ::2], random(24, 16, seed=1)) is None
    assert cublaslt.multiply(even, random(24, 16, seed=1), onto=random(16, 32, seed=2)[:, :16]) is None
    assert cublaslt.multiply(even, random(24, 16, seed=1), torch.float64) is None
    assert cublaslt.multiply(even, random(24, 16, seed=1), torch.float32, bias=random(16, seed=2)) is None
    assert cublaslt.multiply(even, random(24, 16, seed=1), torch.float32, onto=random(16, 16, seed=2)) is None
    room = random(1, 8 + 16 * 24, seed=0)[0]
    assert cublaslt.multiply(room[8:].view(16, 24), random(24, 16, seed=1)) is None
    assert cublaslt.multiply(room[:-8].view(16, 24), random(24, 16, seed=1)) is not None


def test_where_sums_must_come_in_one_order_no_clock_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first way is taken that is not refused."""

    def remembered(*_: object) -> None:
        raise AssertionError("what a clock once found is asked for")

    monkeypatch.setattr(cublaslt, "remembered", remembered)
    torch.use_deterministic_algorithms(True)
    try:
        assert cublaslt.multiply(random(16, 24, seed=0), random(24, 16, seed=1)) is not None
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("bias", [False, True])
def test_gelu_in_its_products(bias: bool, library: ctypes.CDLL) -> None:
    """Beside torch's own, forward and backward."""
    kinds = (cublaslt.GELU | (cublaslt._BIAS_FIRST if bias else 0), cublaslt.GELU_BACKWARD)
    before, made = [library.products(kind) for kind in kinds], []
    for exact in (True, False):
        torch.manual_seed(0)
        up, down = torch.nn.Linear(16, 32, bias), torch.nn.Linear(32, 16, bias)
        x = random(8, 16, seed=5).double() if exact else random(8, 16, seed=5)
        x.requires_grad_()
        if exact:
            up, down = up.double(), down.double()
            y = down(torch.nn.functional.gelu(up(x), approximate="tanh"))
        else:
            y = gelu.feed_forward(x, up, down)
        y.double().pow(2).sum().backward()
        made.append([y.detach(), x.grad, *(weight.grad for weight in (*up.parameters(), *down.parameters()))])
    for wanted, ours in zip(*made, strict=True):
        assert (ours.double() - wanted).norm() <= 2e-2 * wanted.norm()
    assert all(library.products(kind) > count for kind, count in zip(kinds, before, strict=True))


def test_layers_take_these_products(monkeypatch: pytest.MonkeyPatch, library: ctypes.CDLL) -> None:
    """One beside the other, added to a stream."""
    monkeypatch.setattr(products, "_WORTH", 0)
    before = library.products(cublaslt._DEFAULT)
    x, stream = random(8, 16, seed=1), random(8, 24, seed=2)
    first, second = (random(24, 16, seed=seed).float().requires_grad_() for seed in (3, 4))
    joined = products.linears(x, first, second)
    made = products.linear_onto(stream, x, first)
    exact = x.double() @ torch.cat((first, second)).double().T
    close(joined.detach(), exact, torch.bfloat16)
    close(made.detach(), exact[:, :24] + stream, torch.bfloat16)
    made.sum().backward()
    assert first.grad is not None
    close(first.grad, torch.ones(24, 8, dtype=torch.float64) @ x.double(), torch.float32)
    assert library.products(cublaslt._DEFAULT) >= before + 4  # two forward; backward for x and the weight


def sample(name: str) -> tuple[Any, tuple[Any, ...]]:
    a, b = random(16, 24, seed=1), random(24, 32, seed=2)
    packed, angles = random(2 * 8 * 3 * 4, 32, seed=3).view(2, 8, 3, 4, 32), random(8, 32, seed=4).float()
    q, k = random(2 * 6 * 8, 32, seed=5).view(2, 6, 8, 32), random(2 * 3 * 8, 32, seed=6).view(2, 3, 8, 32)
    samples: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "product": (products.product, (a, b, torch.bfloat16)),
        "linear and GELU": (gelu._linear_gelu, (a, b.T.contiguous(), random(32, seed=7))),
        "GELU backward": (gelu._gelu_backward, (a, b, random(16, 32, seed=8))),
        "SwiGLU backward": (swiglu._backward, (random(6, 32, seed=9), random(6, 16, seed=10))),
        "turn": (rotary._turn, (packed, angles, angles)),
        "turn back": (rotary._turn_back, (q, k, k, angles, angles)),
    }
    return samples[name]


@pytest.mark.parametrize(
    "name", ["product", "linear and GELU", "GELU backward", "SwiGLU backward", "turn", "turn back"]
)
def test_what_is_one_step_to_the_compiler_keeps_its_rules(name: str) -> None:
    """Its tensors are new ones, and as it says without computing them."""
    step, values = sample(name)
    torch.library.opcheck(step, values, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"))
