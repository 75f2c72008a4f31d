"""An estimate of the memory a run takes on each device, before it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slayformer.config import TrainConfig
from slayformer.training.objective import BLOCK_BYTES, BLOCK_BYTES_ELSEWHERE

# DeepSpeed's default: the most elements it reduces at once
REDUCE_BUCKET_ELEMENTS = 500_000_000


@dataclass(frozen=True)
class Memory:
    """Bytes on one device; `host` is what an offloaded optimizer takes on the CPU instead."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    host: int = 0

    @property
    def total(self) -> int:
        """Everything on the device."""
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate_memory(
    config: TrainConfig,
    *,
    parameters: int,
    vocabulary_size: int,
    world_size: int,
    on_cpu: bool,
    state_bytes: int = 0,
) -> Memory:
    """Return what training takes per device: with P parameters over N devices, in bytes,

    weights      4 P, from ZeRO stage 3 on 4 P / N; bf16 and fp16 products add a copy of 2 P,
    gradients    4 P, from stage 2 on 4 P / N; from stage 1 on a bucket of 4 min(P, 5 · 10⁸),
    optimizer    AdamW's moments 8 P, in stage 3 or offloaded also a copy of the weights 4 P, from
                 stage 1 on divided by N; on the CPU if it is offloaded,
    activations  what `activation_bytes` says of one forward pass; of sequences that R devices share
                 also the states handed on, `state_bytes` a sequence in all layers, and R of one
                 layer at a time.

    The allocator's own waste and the libraries (about 1 GiB on a GPU) come on top.
    """
    stage = config.engine.zero_stage
    half = config.engine.precision != "fp32"

    def shared(size: int, from_stage: int) -> int:
        return math.ceil(size / world_size) if stage >= from_stage else size

    weights = shared(4 * parameters, 3) + (2 * parameters if half else 0)
    gradients = shared(4 * parameters, 2)
    gradients += 4 * min(parameters, REDUCE_BUCKET_ELEMENTS) if stage > 0 else 0
    offloaded = config.engine.offload_optimizer
    optimizer = shared((12 if stage == 3 or offloaded else 8) * parameters, 1)
    activations = activation_bytes(config, vocabulary_size, on_cpu=on_cpu)
    ranks = config.engine.context_parallel
    if ranks > 1:
        states = config.batch.micro_samples * state_bytes
        activations += states + ranks * states // config.model.layers
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=0 if offloaded else optimizer,
        activations=activations,
        host=optimizer if offloaded else 0,
    )


def activation_bytes(config: TrainConfig, vocabulary_size: int, *, on_cpu: bool) -> int:
    """Return what a forward pass keeps for its backward pass, in bytes.

    Per token and layer of width C with an MLP of r C: fp32 keeps (8 + 2 r) C numbers of 4 bytes
    (inputs of two norms, of three projections and of the output's, of the MLP's two, of gelu; q, k
    and v); half precision keeps 8 C bytes of norms and (6 + 2 r) C numbers of 2. Mechanisms
    recompute their features or scores in the backward pass; what they keep besides q, k and v is
    taken as 4 C numbers of 4 bytes, the mean over those here, which leaves the estimate within 45 %
    for each. What `engine.activation_checkpointing` computes again is kept of one layer at a time:
    of the `attention` half all but its input, of a `block` all but its input. The head adds two
    blocks of logits.
    """
    model, again = config.model, config.engine.activation_checkpointing
    width, inner = model.width, model.mlp_ratio * model.width
    size = 4 if config.engine.precision == "fp32" else 2
    # a mask takes one byte a number
    mask = width if model.dropout else 0
    attention_half = 4 * width + size * 5 * width + 16 * width + mask
    mlp_half = 4 * width + size * (width + 2 * inner) + mask
    whole = attention_half + mlp_half
    kept = {"none": whole, "attention": 4 * width + mlp_half, "block": 4 * width}[again]
    stretch = math.ceil(model.context_length / config.engine.context_parallel)
    tokens = config.batch.micro_samples * stretch
    block = BLOCK_BYTES["cpu"] if on_cpu else BLOCK_BYTES_ELSEWHERE
    logits = 2 * min(4 * tokens * vocabulary_size, block)
    return tokens * (model.layers * kept + whole - kept) + logits
