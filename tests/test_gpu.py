"""What only a GPU computes, beside the plain expression of it: run where there is one."""

import pytest
import torch
from torch import Tensor, nn

from slipstream.data.base import IGNORED
from slipstream.job.models import DecoderModel
from slipstream.plan import Plan
from slipstream.plan.layout import Layout
from slipstream.train.compiled import compile_model
from slipstream.train.kernels import fp8, int8, linear_cross_entropy
from slipstream.train.kernels.attention import attend, attend_backward, attend_plainly, attend_plainly_backward
from slipstream.train.kernels.cross_entropy import overwrite_with_gradient
from slipstream.train.kernels.layers import choose_products
from slipstream.train.models.decoder import Decoder
from slipstream.train.models.dropout import SampleKeys
from slipstream.train.models.folded import fold
from slipstream.train.optim.adamw import LeanAdamW
from slipstream.train.parallel.recompute import recompute_blocks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(ours: Tensor, theirs: Tensor, within: float) -> None:
    error = (ours.double().cpu() - theirs.double().cpu()).norm() / theirs.double().norm()
    assert error < within


@pytest.mark.parametrize("classes", [10_001, 40_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_become_their_gradient(dtype, classes):
    """Some rows are highest at their end, some at their beginning: the kernel goes over them part by part."""
    from slipstream.train.kernels import score_gradient

    scores = random(37, classes) * 3
    scores[::3] += torch.linspace(0, 30, classes)
    scores[1::3] += torch.linspace(30, 0, classes)
    scores = scores.to(dtype)
    targets = torch.randint(0, classes, (37,), generator=torch.Generator().manual_seed(0))
    targets[::5] = IGNORED
    ours, plain = scores.cuda(), scores.double()
    losses = score_gradient.overwrite_with_gradient(ours, targets.cuda())
    expected = overwrite_with_gradient(plain, targets)
    close(losses, expected, 1e-5)
    close(ours, plain * (targets != IGNORED).unsqueeze(1), 1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_adamw_in_one_pass(skip):
    made = []
    for device in ("cpu", "cuda"):
        weight = nn.Parameter(random(300, 41).to(device))
        group = {"params": [weight], "weight_decay": 0.1}
        optimizer = LeanAdamW([group], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, state=torch.float32)
        for step in range(4):
            weight.grad = random(300, 41, seed=step).to(device)
            optimizer.skip = torch.tensor(skip, device=device)
            optimizer.factor = torch.tensor(0.5, device=device)
            optimizer.step()
        made.append(weight.detach())
    close(made[1], made[0], 1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [64, 61])
def test_gelu_folded_into_its_products(rows, bias):
    """Of 61 rows the library takes no product; the plain expressions do."""
    from slipstream.train.kernels.gelu import feed_forward

    made = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        up, down = nn.Linear(768, 3072, bias), nn.Linear(3072, 768, bias)
        for number, parameter in enumerate((*up.parameters(), *down.parameters())):
            parameter.data = (random(*parameter.shape, seed=number) * 0.05).to(device, dtype)
        x = random(rows, 768).bfloat16().to(device, dtype).requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            y = feed_forward(x, up, down) if device == "cuda" else down(nn.functional.gelu(up(x), approximate="tanh"))
        y.backward(random(rows, 768, seed=9).bfloat16().to(device, y.dtype))
        made.append((y.detach(), x.grad, *(parameter.grad for parameter in (*up.parameters(), *down.parameters()))))
    for exact, ours in zip(*made, strict=True):
        close(ours, exact, 1e-2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rows", [512, 509])
def test_a_linear_layer_of_the_best_products(rows, compiled, bias, monkeypatch):
    """Of 509 rows the library takes no product; torch does. The gradient of the weight is not rounded to bf16."""
    from slipstream.train.kernels import products

    monkeypatch.setattr(products, "_WORTH", 0)
    torch.compiler.reset()
    linear = torch.compile(products.linear) if compiled else products.linear
    x, grad = random(2, rows, 768).bfloat16(), random(2, rows, 520).bfloat16()
    weight, added = random(520, 768).bfloat16().float(), random(520).bfloat16().float()
    made = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        leaves = [part.to(device, dtype, copy=True).requires_grad_() for part in (x, weight, added)]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            y = (linear if device == "cuda" else nn.functional.linear)(
                leaves[0], leaves[1], leaves[2] if bias else None
            )
        y.backward(grad.to(device, y.dtype))
        made.append((y.detach(), *(leaf.grad for leaf in leaves[: 2 + bias])))
    for (exact, ours), within in zip(zip(*made, strict=True), (5e-3, 5e-3, 1e-5, 1e-5), strict=False):
        close(ours, exact, within)


@pytest.mark.parametrize("compiled", [False, True])
def test_linear_layers_joined(compiled, monkeypatch):
    """Also where the compiler has the gradients of both, which are parts of one."""
    from slipstream.train.kernels import products, swiglu

    for module in (products, swiglu):
        monkeypatch.setattr(module, "_WORTH", 0)
    torch.compiler.reset()

    def forward(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return swiglu.swiglu(products.linears(x, gate, up))

    forward = torch.compile(forward) if compiled else forward
    x, gate, up = random(2, 512, 768), random(520, 768) * 0.05, random(520, 768, seed=1) * 0.05
    made = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        leaves = [part.bfloat16().to(device, dtype).requires_grad_() for part in (x, gate, up)]
        if device == "cpu":
            y = nn.functional.silu(leaves[0] @ leaves[1].T) * (leaves[0] @ leaves[2].T)
        else:
            with torch.autocast("cuda", torch.bfloat16):
                y = forward(*leaves)
        y.backward(random(2, 512, 520).bfloat16().to(device, y.dtype))
        made.append((y.detach(), *(leaf.grad for leaf in leaves)))
    for exact, ours in zip(*made, strict=True):
        close(ours, exact, 1e-2)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("preset", [{"preset": "llama-1b"}, {"preset": "gpt2-124m"}])
def test_blocks_as_they_are_trained(preset, recompute, monkeypatch):
    """Compiled, with everything that is folded: beside the plain model in fp64."""
    from slipstream.train.kernels import products, rotary, swiglu

    for module in (products, rotary, swiglu):
        monkeypatch.setattr(module, "_WORTH", 0)
    torch.compiler.reset()
    small = {"layers": 3, "hidden": 256, "heads": 8, "feed_forward": 512, "vocabulary": 512}
    section = DecoderModel.model_validate(
        {**preset, **small, **({"kv_heads": 2} if "llama" in preset["preset"] else {})}
    )
    plan = Plan.model_construct(
        device="cuda", precision="bf16", compile=True, layout=Layout(micro_batch=1, recompute=recompute)
    )
    tokens = torch.randint(0, 512, (2, 129), generator=torch.Generator().manual_seed(1))
    made = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = Decoder(section, 512, 128).to(device, torch.float64 if device == "cpu" else torch.float32)
        if device == "cuda":
            choose_products(model.blocks, plan)
            fold(model.blocks, plan)
            compile_model(model, list(model.blocks), keep_little=False, at_once=True)
            if recompute == "full":
                recompute_blocks(model.blocks, "full", SampleKeys())
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(tokens[:, :-1].to(device), tokens[:, 1:].to(device))
        loss.backward()
        made.append((loss.detach(), *(weight.grad for weight in model.parameters())))
    for exact, ours in zip(*made, strict=True):
        close(ours, exact, 3e-2)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("queries", "groups", "size"), [(4, 8, 64), (1, 3, 128), (3, 2, 32)])
@pytest.mark.parametrize("compiled", [False, True])
def test_queries_and_keys_are_turned_in_one_pass(queries, groups, size, documents, compiled, monkeypatch):
    from slipstream.train.kernels import rotary

    monkeypatch.setattr(rotary, "_WORTH", 0)
    torch.compiler.reset()
    turned = torch.compile(rotary.turned) if compiled else rotary.turned
    angles = random(2, 1, 77, size // 2) if documents else random(77, size // 2)
    cos, sin = (torch.cat((sign * wave, wave), -1) for sign, wave in ((1, angles.cos()), (-1, angles.sin())))
    made = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        packed = random(2, 77, groups, queries + 2, size).bfloat16().to(device, dtype).requires_grad_()
        turn = turned if device == "cuda" else rotary.turn_plainly
        parts = turn(packed, cos.to(device), sin.to(device))
        grads = [random(*part.shape, seed=number).bfloat16().to(device, dtype) for number, part in enumerate(parts)]
        torch.autograd.backward(parts, grads)
        made.append((*(part.detach() for part in parts), packed.grad))
    for exact, ours in zip(*made, strict=True):
        close(ours, exact, 4e-3)


@pytest.mark.parametrize("classes", [1000, 50_304])
def test_scores_by_the_quickest_product(classes):
    from slipstream.train.kernels import cublaslt

    hidden, weight = random(512, 768).bfloat16().cuda(), random(classes, 768).bfloat16().cuda()
    made = cublaslt.multiply(hidden, weight.T)
    assert made is not None
    close(made, hidden.double().cpu() @ weight.double().cpu().T, 5e-3)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_way_that_is_refused_is_passed_over(fixed, monkeypatch):
    """A way of all zeros is none; where there is no other, the caller is told."""
    from slipstream.train.kernels import cublaslt

    left, right = random(264, 776).bfloat16().cuda(), random(1032, 776).bfloat16().cuda()
    monkeypatch.setattr(cublaslt, "remembered", lambda _kind, _what, measure: measure())
    found = cublaslt._Product._ways
    torch.use_deterministic_algorithms(fixed)
    try:
        for ways, expected in (
            (lambda self: [cublaslt._Way(), *found(self)], True),
            (lambda _: [cublaslt._Way()], False),
        ):
            monkeypatch.setattr(cublaslt._Product, "_ways", ways)
            cublaslt._product.cache_clear()
            assert (cublaslt.multiply(left, right.T) is not None) == expected
    finally:
        torch.use_deterministic_algorithms(False)
        cublaslt._product.cache_clear()


def test_fp8_both_ways():
    x = random(160, 208).bfloat16()
    (here, turned), (plain, _) = fp8.quantise(x.cuda(), by_row=False), fp8.quantise(x, by_row=False)
    assert torch.equal(here.values.float().cpu(), plain.values.float())
    assert torch.equal(turned.values.float(), here.values.float().T)


@pytest.mark.parametrize("linear", [fp8.linear, lambda x, w, b: fp8.linear(x, w, b, by_row=True), int8.linear])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_linear_layer_in_8_bits_learns(linear, compiled):
    """Also where the compiler has it: once it gave no gradients there."""
    x, weight, grad = random(64, 96), random(48, 96), random(64, 48)
    made = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        leaves = [part.to(device, dtype if part is x else None, copy=True).requires_grad_() for part in (x, weight)]
        if device == "cpu":
            y = leaves[0] @ leaves[1].double().T
        else:
            with torch.autocast("cuda", torch.bfloat16):
                y = (torch.compile(linear) if compiled else linear)(*leaves, None)
        y.backward(grad.to(device, y.dtype))
        made.append((y.detach(), *(leaf.grad for leaf in leaves)))
    for ours, exact in zip(made[1], made[0], strict=True):
        close(ours, exact, 0.08)


def test_head_and_loss_in_one():
    hidden, weight = random(9000, 64), random(1000, 64)
    targets = torch.randint(0, 1000, (9000,), generator=torch.Generator().manual_seed(1))
    made = []
    for device, compute in (
        ("cpu", linear_cross_entropy.linear_cross_entropy_plainly),
        ("cuda", linear_cross_entropy.linear_cross_entropy),
    ):
        leaves = [part.to(device, copy=True).requires_grad_() for part in (hidden, weight)]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = compute(*leaves, targets.to(device))
        loss.backward()
        made.append((loss.detach(), *(leaf.grad for leaf in leaves)))
    for ours, exact in zip(made[1], made[0], strict=True):
        close(ours, exact, 1e-2)


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_attention_to_a_part_of_the_keys(dtype, within):
    q, k, v, grad = (random(2, 4, 128, 64, seed=number).to(dtype) for number in range(4))
    there = [part.cuda() for part in (q, k, v, grad)]
    output, total = attend(*there[:3], causal=True)
    made = (output, total, *attend_backward(there[3], *there[:3], output, total, True))
    exact = [part.double() for part in (q, k, v, grad)]
    plain, plain_total = attend_plainly(*exact[:3], True)
    for ours, theirs in zip(
        made,
        (plain, plain_total, *attend_plainly_backward(exact[3], *exact[:3], plain, plain_total, True)),
        strict=True,
    ):
        close(ours, theirs, within)
