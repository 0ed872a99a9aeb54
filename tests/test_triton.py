"""Kernels in Triton beside the plain expressions, by its interpreter (tests/conftest.py), where there is no GPU."""

from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch import Tensor

from slipstream.data.base import IGNORED
from slipstream.train.kernels import rotary, swiglu
from slipstream.train.kernels.cross_entropy import overwrite_with_gradient
from slipstream.train.optim.adamw import update_plainly

pytest.importorskip("triton")
NAMES = ("adamw", "fp8_cast", "rotary_pass", "score_gradient", "swiglu_halves")


@pytest.fixture(scope="module")
def kernels() -> dict[str, ModuleType]:
    return {name: import_module(f"slipstream.train.kernels.{name}") for name in NAMES}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(ours: Tensor, exact: Tensor, within: float) -> None:
    assert ours.shape == exact.shape
    assert (ours.double() - exact.double()).norm() <= within * exact.double().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("classes", [3, 1000, 20_001])
def test_scores_become_their_gradient(classes: int, dtype: torch.dtype, kernels: dict[str, ModuleType]) -> None:
    scores = (random(7, classes) * 3).to(dtype)
    scores[::3] += torch.linspace(0, 30, classes)  # some rows are highest at their end
    targets = torch.randint(0, classes, (7,), generator=torch.Generator().manual_seed(0))
    targets[::5] = IGNORED
    ours, plain = scores.clone(), scores.double()
    losses = kernels["score_gradient"].overwrite_with_gradient(ours, targets)
    close(losses, overwrite_with_gradient(plain, targets), 1e-5)
    close(ours, plain * (targets != IGNORED).unsqueeze(1), 1e-5 if dtype == torch.float32 else 5e-3)
    assert not ours[targets == IGNORED].any()


@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(300, 41), (5,)])
def test_adamw(shape: tuple[int, ...], state: torch.dtype, skip: float, kernels: dict[str, ModuleType]) -> None:
    """Also how the state is rounded, up or down at random."""
    weight, gradient = random(*shape), random(*shape, seed=1)
    mean, square = random(*shape, seed=2).to(state), random(*shape, seed=3).square().to(state)
    numbers = [torch.tensor(value) for value in (3.0, 0.5, skip)]
    made = [[each.clone() for each in (weight, gradient, mean, square, *numbers)] for _ in range(2)]
    settings = (1e-2, (0.9, 0.95), 1e-8, 0.1)
    kernels["adamw"].update(*made[0], *settings)
    if not skip:
        update_plainly(*made[1], *settings)
    for number, (ours, plain) in enumerate(zip(*made, strict=True)):
        close(ours, plain, 1e-2 if number == 2 and state == torch.bfloat16 else 1e-6)  # the interpreter cuts off


@pytest.mark.parametrize("width", [8, 1500])
def test_swiglu_backward(width: int, kernels: dict[str, ModuleType]) -> None:
    both, gradient = random(6, 2 * width).bfloat16(), random(6, width).bfloat16()
    made = kernels["swiglu_halves"].backward(both, gradient)
    close(made, swiglu.swiglu_backward_plainly(both.double(), gradient.double()), 5e-3)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize(("groups", "queries", "size"), [(3, 2, 64), (2, 1, 32), (1, 5, 128)])
def test_queries_and_keys_are_turned(
    groups: int, queries: int, size: int, alike: bool, kernels: dict[str, ModuleType]
) -> None:
    """There and back; with the same angles for all sequences, or their own."""
    packed = random(2, 40, groups, queries + 2, size).bfloat16()
    angles = random(40, size // 2) if alike else random(2, 1, 40, size // 2)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    apart = rotary._apart(packed)
    kernels["rotary_pass"].turn(packed, *apart, cos, sin, back=False)
    for ours, exact in zip(apart, rotary.turn_plainly(packed.double(), cos.double(), sin.double()), strict=True):
        close(ours, exact, 5e-3)
    together = rotary._together(apart[0], apart[1])
    kernels["rotary_pass"].turn(together, *apart, cos, sin, back=True)
    close(together, packed, 8e-3)


@pytest.mark.parametrize("shape", [(160, 208), (16, 144)])
def test_a_matrix_and_its_transpose_scaled(
    shape: tuple[int, int], kernels: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp16, for the interpreter's own fp8 is wrong: by up to 30% in numbers that are not rare."""
    monkeypatch.setattr(kernels["fp8_cast"], "_DTYPE", torch.float16)
    x, scale = random(*shape).bfloat16(), torch.tensor(0.5)
    straight, turned = kernels["fp8_cast"].cast_both_ways(x, scale)
    close(straight, x / 0.5, 1e-3)
    assert torch.equal(turned, straight.T)
