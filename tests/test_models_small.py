"""ResNet, MLP, linear and the user's own: sizes, shapes, and what is refused."""

import copy
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from slipstream.data.base import Facts
from slipstream.job import Job
from slipstream.job.models import ResnetModel
from slipstream.train import compiled
from slipstream.train.compiled import compile_model
from slipstream.train.models import MODELS, build_model
from slipstream.train.models.batchnorm import synchronise_batch_norm
from slipstream.train.models.resnet import Resnet

IMAGES = Facts(inputs=(1, 8, 8), outputs=10, tokens=False)
ROWS = Facts(inputs=(16,), outputs=3, tokens=False)


def job(model: dict[str, object], source: str = "digits") -> Job:
    return Job.model_validate(
        {
            "name": "test",
            "model": model,
            "data": {"source": source},
            "train": {"steps": 1, "batch": 2, "optimizer": {"name": "sgd", "lr": 0.1}},
        }
    )


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("depth", "published"), [(18, 11_689_512), (50, 25_557_032)])
def test_published_resnets(depth: int, published: int) -> None:
    with torch.device("meta"):
        model = Resnet(ResnetModel.model_validate({"kind": "resnet", "depth": depth}), channels=3, classes=1000)
        assert count(model) == published
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("stem", ["small", "imagenet"])
def test_resnets_of_any_shape(depth: int, norm: str, stem: str) -> None:
    settings: dict[str, object] = {"kind": "resnet", "depth": depth, "norm": norm, "stem": stem, "width": 12}
    model = build_model(job(settings), IMAGES)
    assert any(isinstance(part, nn.BatchNorm2d) for part in model.modules()) == (norm == "batch")
    output = model(torch.randn(2, *IMAGES.inputs))
    assert output.shape == (2, 10)
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_block_starts_as_the_identity() -> None:
    model = build_model(job({"kind": "resnet", "stem": "small", "width": 4}), IMAGES)
    x = torch.rand(2, 4, 8, 8)
    torch.testing.assert_close(model.get_submodule("blocks.0")(x), x)


def test_a_resnet_needs_images() -> None:
    with pytest.raises(ValueError, match=r"resnet takes images of \(channels, height, width\).*\(16,\)"):
        build_model(job({"kind": "resnet"}), ROWS)


def test_mlp_and_linear() -> None:
    mlp = build_model(job({"kind": "mlp", "hidden": [32, 24], "dropout": 0.1}), IMAGES)
    assert mlp(torch.randn(5, 1, 8, 8)).shape == (5, 10)
    assert count(mlp) == 65 * 32 + 33 * 24 + 25 * 10
    assert sum(type(part) is nn.Dropout for part in mlp.modules()) == 2
    linear = build_model(job({"kind": "linear"}, "synthetic"), ROWS)
    assert linear(torch.randn(5, 16)).shape == (5, 3)
    assert count(linear) == 17 * 3
    with pytest.raises(ValueError, match="take numbers"):
        build_model(job({"kind": "linear"}), Facts(inputs=(16,), outputs=9, tokens=True))


@pytest.mark.parametrize("settings", [{"kind": "mlp"}, {"kind": "linear"}, {"kind": "resnet"}])
def test_weights_follow_from_the_seed(settings: dict[str, object]) -> None:
    def weights() -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        return build_model(job(settings), IMAGES).state_dict()

    first, second = weights(), weights()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_every_section_has_a_model() -> None:
    from slipstream.job import models

    sections = {kind for name, kind in vars(models).items() if name.endswith("Model")}
    assert set(MODELS) == {kind for kind in sections if kind.__module__ == models.__name__}


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_models.py").write_text(
        "from torch import nn\n"
        "def good(width=2): return nn.Linear(16, width)\n"
        "def wrong(): return 7\n"
        "def broken(): raise KeyError('weights')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_models", raising=False)


@pytest.mark.usefixtures("user_module")
def test_the_users_own_model() -> None:
    model = build_model(job({"import": "users_models:good", "args": {"width": 3}}, "synthetic"), ROWS)
    assert isinstance(model, nn.Linear)
    assert model.out_features == 3
    with pytest.raises(ValueError, match=r"model.import: users_models:wrong returned int; it must return"):
        build_model(job({"import": "users_models:wrong"}, "synthetic"), ROWS)
    with pytest.raises(ValueError, match=r"model.import: users_models:broken.*KeyError") as caught:
        build_model(job({"import": "users_models:broken"}, "synthetic"), ROWS)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_resnet_is_compiled_without_a_break(norm: str, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a compiler that only traces: what it makes of the graph is torch's affair."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = build_model(job({"kind": "resnet", "depth": 18, "norm": norm, "width": 4, "stem": "small"}), IMAGES)
    synchronise_batch_norm(model)
    images = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    plain = copy.deepcopy(model.double())
    compile_model(model, [], keep_little=False, at_once=at_once)
    torch.testing.assert_close(model(images), plain(images))
    model(images).sum().backward()
    plain(images).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_what_the_compiler_is_told_of_resnets_is_known_to_it() -> None:
    """Else the first step on a GPU would fail."""
    import torch._inductor.config as known

    assert {type(getattr(known, name)) for name in compiled._TUNED} == {bool}
