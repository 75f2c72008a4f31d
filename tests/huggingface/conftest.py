"""Small models of transformers' kind, with weights large enough to say different things."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

VOCABULARY, CONTEXT = 211, 96


def tiny_model(attention: str, **changes: Any) -> Any:
    from slayformer.huggingface import SlayformerConfig, SlayformerForCausalLM

    shape = {"layers": 2, "heads": 2, "width": 32, "context_length": CONTEXT}
    sizes = {"vocab_size": VOCABULARY, **shape, **changes}
    config = SlayformerConfig(attention=attention, seed=5, **sizes)
    model = SlayformerForCausalLM(config).eval()
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".attention." not in name:
                # larger, so that the likeliest token changes along the way, and never the
                # values that the seed alone gives
                parameter.mul_(4).add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """Return `tiny(attention, **changes)`, a new SlayformerForCausalLM in evaluation mode."""
    return tiny_model


@pytest.fixture
def ids() -> torch.Tensor:
    """Return three rows of 20 ids, none of them 0."""
    return torch.randint(1, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(1))
