"""Dropout masks belong to samples: the same on any split, in any precision, and when recomputed."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slipstream.train.models.dropout import SampleDropout, SampleKeys, own_dropout


def masks(keys: SampleKeys, layer: SampleDropout, positions: Tensor, *shape: int) -> Tensor:
    """1 where the layer keeps, 0 where it drops."""
    with keys.of(positions):
        return (layer(torch.ones(len(positions), *shape)) > 0).float()


def fresh(p: float = 0.5, seed: int = 0, layer: int = 0) -> tuple[SampleKeys, SampleDropout]:
    keys = SampleKeys()
    return keys, SampleDropout(p, seed, layer, keys, "drop")


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_rate_is_right_and_the_mean_is_kept(p: float) -> None:
    keys, layer = fresh(p)
    x = torch.ones(64, 10_000, dtype=torch.float64)
    with keys.of(torch.arange(64)):
        y = layer(x)
    kept = (y > 0).double()
    error = 5 * (p * (1 - p) / x.numel()) ** 0.5
    assert abs(float(kept.mean()) - (1 - p)) < error
    assert abs(float(y.mean()) - 1) < error / (1 - p)
    assert (kept.mean(dim=1) - (1 - p)).abs().max() < 5 * (p * (1 - p) / 10_000) ** 0.5
    assert (kept.mean(dim=0) - (1 - p)).abs().max() < 6 * (p * (1 - p) / 64) ** 0.5


def test_masks_are_independent() -> None:
    """Of neighbours at any small distance, of samples, of layers, of seeds: correlation within 5 deviations of 0."""
    keys, layer = fresh()
    elements = 40_000
    mask = masks(keys, layer, torch.arange(25), elements)
    few = 5 / (25 * elements) ** 0.5
    for distance in (1, 2, 3, 4, 5, 8, 16, 64, 256):
        assert abs(correlation(mask[:, distance:], mask[:, :-distance])) < few, distance
    for distance in (1, 2, 3, 8):
        assert abs(correlation(mask[distance:], mask[:-distance])) < 6 / (17 * elements) ** 0.5, distance
    for other in (fresh(layer=1), fresh(layer=2), fresh(seed=1), fresh(seed=2**62)):
        assert abs(correlation(mask, masks(*other, torch.arange(25), elements))) < few
    # The 16-element patterns must be evenly distributed too: chi-square of the 256 values of 8 neighbours.
    bytes_ = (mask.view(-1, 8) @ 2 ** torch.arange(8.0)).long()
    found = torch.bincount(bytes_, minlength=256).double()
    expected = len(bytes_) / 256
    assert 255 - 5 * (2 * 255) ** 0.5 < float(((found - expected) ** 2 / expected).sum()) < 255 + 5 * (2 * 255) ** 0.5


@pytest.mark.parametrize("shape", [(7,), (3, 5), (4, 8, 2), (1,)])
def test_a_batch_is_its_parts(shape: tuple[int, ...]) -> None:
    keys, layer = fresh()
    positions = torch.tensor([5, 900, 7, 2**40, 11, 12, 13, 0])
    whole = masks(keys, layer, positions, *shape)
    parts = [masks(keys, layer, part, *shape) for part in positions.split([3, 3, 2])]
    assert torch.equal(whole, torch.cat(parts))


def test_rows_grouped_by_sample() -> None:
    keys, layer = fresh()
    whole = masks(keys, layer, torch.arange(4), 6, 5)
    with keys.of(torch.arange(4)):
        rows = (layer(torch.ones(24, 5)) > 0).float()
    assert torch.equal(whole.view(24, 5), rows)
    with keys.of(torch.arange(5)), pytest.raises(ValueError, match=r"drop: .*\(24, 5\) for 5 samples"):
        layer(torch.ones(24, 5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_precision_does_not_change_the_mask(dtype: torch.dtype) -> None:
    keys, layer = fresh(0.3)
    with keys.of(torch.arange(3)):
        ours = layer(torch.ones(3, 50, dtype=dtype))
    assert ours.dtype == dtype
    assert torch.equal(ours > 0, masks(keys, layer, torch.arange(3), 50) > 0)


def test_evaluation_and_extremes() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    keys, layer = fresh(0.5)
    assert layer.eval()(x) is x
    assert fresh(0.0)[1](x) is x
    all_dropped = fresh(1.0)[1](x)
    all_dropped.sum().backward()
    assert not all_dropped.any()
    with pytest.raises(AssertionError, match=r"outside SampleKeys.of"):
        layer.train()(x)
    with keys.of(torch.arange(0)):
        assert layer(torch.ones(0, 6)).shape == (0, 6)


def test_the_gradient_passes_where_the_value_passed() -> None:
    keys, layer = fresh(0.25)
    x = torch.ones(4, 100, requires_grad=True)
    with keys.of(torch.arange(4)):
        y = layer(x)
    y.sum().backward()
    assert torch.equal(y.detach(), x.grad)
    torch.testing.assert_close(y.detach().unique(), torch.tensor([0.0, 4 / 3]))


class Users(nn.Module):
    """Uses one dropout twice, and keeps another under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.drop = nn.Dropout(0.5)
        self.again = self.drop
        self.images = nn.Dropout2d(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.drop(self.layers[1](self.drop(self.layers[0](inputs))))


def test_own_dropout_of_a_users_model() -> None:
    model = Users()
    names = list(model.state_dict())
    keys = own_dropout(model, seed=1)
    assert isinstance(model.drop, SampleDropout)
    assert isinstance(model.again, SampleDropout)
    assert type(model.images) is nn.Dropout2d
    assert list(model.state_dict()) == names
    x, positions = torch.randn(8, 16), torch.arange(100, 108)

    def run(inputs: Tensor, positions: Tensor) -> Tensor:
        with keys.of(positions):
            return model(inputs)

    parts = zip(x.split([3, 3, 2]), positions.split([3, 3, 2]), strict=True)
    torch.testing.assert_close(run(x, positions), torch.cat([run(*part) for part in parts]))


def test_a_layer_called_twice_drops_differently() -> None:
    keys, layer = fresh()
    with keys.of(torch.arange(4)):
        first, second = layer(torch.ones(4, 100)), layer(torch.ones(4, 100))
    assert not torch.equal(first, second)


def test_recomputation_drops_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
    keys = own_dropout(model, seed=0)
    x = torch.randn(4, 8, requires_grad=True)

    def gradient(recompute: bool) -> Tensor:
        with keys.of(torch.arange(4)):
            y = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
            (result,) = torch.autograd.grad(y.square().sum(), x)
        return result

    assert torch.equal(gradient(recompute=True), gradient(recompute=False))


def test_recomputation_of_a_shared_layer_is_refused() -> None:
    model = Users()
    keys = own_dropout(model, seed=0)
    x = torch.randn(4, 16, requires_grad=True)
    with keys.of(torch.arange(4)):
        y = checkpoint(model, x, use_reentrant=False)
        with pytest.raises(ValueError, match="drop is called 2 times"):
            y.sum().backward()


def test_it_compiles_into_one_graph() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
    keys, x = own_dropout(model, seed=0), torch.randn(4, 8)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for start in (0, 4):
        with keys.of(torch.arange(start, start + 4)):
            expected = model(x)
        with keys.of(torch.arange(start, start + 4)):
            assert torch.equal(compiled(x), expected)


def test_random_numbers_of_its_own_are_reported() -> None:
    keys = SampleKeys()
    with pytest.warns(UserWarning, match="use nn.Dropout instead"), keys.of(torch.arange(2)):
        F.dropout(torch.ones(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with keys.of(torch.arange(2)):  # once is enough
            F.dropout(torch.ones(2, 2))
        quiet, layer = fresh()
        masks(quiet, layer, torch.arange(2), 3)
