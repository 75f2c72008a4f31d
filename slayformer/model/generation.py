"""Continue a text: one prefill, then one token at a time through the mechanism's states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slayformer.errors import ConfigError
from slayformer.model.token_graph import TokenGraph

if TYPE_CHECKING:
    from slayformer.data.tokenizer import Tokenizer
    from slayformer.model.gpt2 import GPT2


def generate(
    model: GPT2,
    ids: list[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop_token: int | None = None,
    cuda_graph: bool = False,
) -> Iterator[int]:
    """Return an iterator over the ids that continue the prompt `ids`.

    Temperature 0 takes the likeliest token; otherwise tokens are drawn from the softmax of
    logits / `temperature`, cut to the `top_k` likeliest, by a CPU generator seeded with `seed`.
    It ends after `max_new_tokens`, before `stop_token` (which is not returned), or when prompt and
    continuation fill the model's context. With `cuda_graph` a GPU replays one recorded step.

    Raises ConfigError at once if the prompt is empty or leaves no room, or an option is impossible;
    after the first token if a graph is and the mechanism's state grows.
    """
    if not ids:
        raise ConfigError("prompt", "", "needs at least one token")
    if len(ids) >= model.context_length:
        hint = f"must be shorter than the model's context of {model.context_length} tokens"
        raise ConfigError("prompt", f"{len(ids)} tokens", hint)
    if max_new_tokens < 0:
        raise ConfigError("tokens", max_new_tokens, "must be 0 or greater")
    if not 0 <= temperature < float("inf"):
        raise ConfigError("temperature", temperature, "must be 0 (greedy) or a positive number")
    if top_k is not None and top_k < 1:
        raise ConfigError("top_k", top_k, "must be 1 or greater")
    if not -(2**63) <= seed < 2**64:
        raise ConfigError("seed", seed, "must be at least -2**63 and below 2**64")
    device = next(model.parameters()).device
    if cuda_graph and device.type != "cuda":
        raise ConfigError("cuda_graph", True, f"needs a GPU; the model is on the {device.type}")
    count = min(max_new_tokens, model.context_length - len(ids))
    draw = partial(
        _sample, temperature=temperature, top_k=top_k, generator=torch.Generator().manual_seed(seed)
    )
    return _continue(model, list(ids), count, draw, stop_token, cuda_graph)


def _continue(
    model: GPT2,
    ids: list[int],
    count: int,
    draw: Callable[[Tensor], int],
    stop_token: int | None,
    cuda_graph: bool,
) -> Iterator[int]:
    device = next(model.parameters()).device
    states = model.init_states(1)
    graph: TokenGraph | None = None
    was_training = model.training
    model.eval()
    try:
        for _ in range(count):
            # not around the yield: the caller's own gradients must stay as they were
            with torch.no_grad():
                ids_1T = torch.tensor([ids], device=device)
                if graph is None:
                    hidden, states = model(ids_1T, states=states)
                    logits_1V = model.logits(hidden[:, -1])
                else:
                    logits_1V = graph(ids_1T)
                token = draw(logits_1V[0].float().cpu())
                if cuda_graph and graph is None:
                    graph = TokenGraph(model, states)
            if token == stop_token:
                return
            yield token
            ids = [token]
    finally:
        model.train(was_training)


def _sample(
    logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    kept = logits_V.topk(min(top_k or len(logits_V), len(logits_V)))
    # below this a temperature is 0 in the logits' own precision
    temperature = max(temperature, torch.finfo(logits_V.dtype).tiny)
    # subtracting the maximum first keeps a tiny temperature from overflowing
    probabilities = ((kept.values - kept.values[0]) / temperature).softmax(-1)
    return int(kept.indices[torch.multinomial(probabilities, 1, generator=generator)])


def stream_text(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Return the text of `ids` piece by piece as they come.

    A character whose bytes are split over tokens is held back until it is whole; what is still
    incomplete at the end comes as U+FFFD. The pieces join to `tokenizer.decode(ids)`.
    """
    seen: list[int] = []
    printed = ""
    for token in ids:
        seen.append(token)
        text = tokenizer.decode(seen)
        # a replacement character at the end may be the beginning of a character
        whole = text.rstrip("\ufffd")
        if len(whole) > len(printed):
            yield whole[len(printed) :]
            printed = whole
    rest = tokenizer.decode(seen)[len(printed) :]
    if rest:
        yield rest
