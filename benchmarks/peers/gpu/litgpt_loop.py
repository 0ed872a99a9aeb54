"""LitGPT's model, first weights and loss, with Fabric, in the order of its own pretraining: compiled, then set up."""

import lightning
from litgpt.model import GPT, Config
from litgpt.pretrain import initialize_weights
from litgpt.utils import chunked_cross_entropy
from peer import ON_GPU, Decoder, drive
from torch import Tensor


def config(shape: Decoder) -> Config:
    """Llama's family, in its words."""
    return Config(
        block_size=shape.sequence,
        vocab_size=shape.vocabulary,
        padded_vocab_size=shape.vocabulary,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_query_groups=shape.kv_heads,
        n_embd=shape.hidden,
        intermediate_size=shape.feed_forward,
        rotary_percentage=1.0,
        rope_base=int(shape.rope_theta),
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=shape.norm_eps,
        mlp_class_name="LLaMAMLP",
    )


def main() -> None:
    shape = Decoder.read()
    fabric = lightning.Fabric(accelerator="cuda" if ON_GPU else "cpu", devices=1, precision="bf16-mixed")
    fabric.launch()
    with fabric.init_module(empty_init=True):
        plain = GPT(config(shape))
    initialize_weights(fabric, plain, n_layer=shape.layers, n_embd=shape.hidden)
    if shape.tied:
        plain.transformer.wte.weight = plain.lm_head.weight
    model = fabric.setup(shape.compiled(plain))
    optimizer = fabric.setup_optimizers(shape.adamw(model.parameters()))

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = chunked_cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=shape.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    drive(shape, step)


if __name__ == "__main__":
    main()
