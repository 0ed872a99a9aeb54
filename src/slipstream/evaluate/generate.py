"""Text from a next-token model, to see what it learned. Without a cache: fine for a sample, not for serving."""

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from slipstream.data.tokenizer import ids_of


@torch.no_grad()
def generate(
    model: nn.Module,
    tokenizer_json: bytes,
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int,
    context: int,
    device: torch.device | str,
) -> str:
    """The prompt and its continuation. Temperature 0 always takes the likeliest token."""
    tokenizer = Tokenizer.from_buffer(tokenizer_json)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    end = ids_of(tokenizer).end_of_text
    if not ids and end is None:
        raise ValueError("train.sample.prompt is empty, and the tokeniser has no end-of-text token to start from")
    text = torch.tensor([ids or [end]], device=device)
    random = torch.Generator().manual_seed(seed)  # on the CPU, so that every device draws the same
    training = model.training
    model.eval()
    for _ in range(tokens):
        logits = model(text[:, -context:])[:, -1]
        text = torch.cat((text, _choose(logits, temperature, random).to(device)), dim=1)
    model.train(training)
    decoded: str = tokenizer.decode(text[0].tolist())
    return decoded


def _choose(logits: Tensor, temperature: float, random: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    return torch.multinomial((logits.double().cpu() / temperature).softmax(dim=-1), 1, generator=random)
