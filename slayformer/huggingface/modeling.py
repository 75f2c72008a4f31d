"""SLAYformer models as transformers knows models: load, save, score, train and generate.

Shape suffixes: B batch, T positions, C model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import local_torch_dtype, slice_logits_to_keep
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from slayformer.errors import CheckpointError, ConfigError
from slayformer.huggingface.cache import state_layers
from slayformer.huggingface.configuration import SlayformerConfig
from slayformer.model.gpt2 import GPT2, INITIAL_STANDARD_DEVIATION, Block, ModelState
from slayformer.model.recompute import CHECKPOINT, Checkpoint


class SlayformerPreTrainedModel(PreTrainedModel):
    """What both models share: how weights are made, loaded and kept."""

    config_class = SlayformerConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]  # noqa: RUF012, the base class wants lists
    _can_record_outputs = {"hidden_states": Block}  # noqa: RUF012
    supports_gradient_checkpointing = True
    # whether it is on, as transformers asks for it
    gradient_checkpointing = False

    def _init_weights(self, module: nn.Module) -> None:
        """Draw a new embedding, which is to take the place of ours, as GPT-2's are.

        All else is left alone: `GPT2` has drawn every weight from the seed.
        """
        is_new = all(module is not own for own in self.modules())
        if is_new and isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=INITIAL_STANDARD_DEVIATION)

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Checkpoint = CHECKPOINT,
        every_n_layers: int = 1,
    ) -> None:
        """Let the backward pass compute every `every_n_layers`-th block again, or keep them all.

        Raises ConfigError if the mechanism draws its features anew while it trains.
        """
        if enable and self.config.attention_options().redraws():
            hint = "cannot follow draws that change in training; train.py takes redraw_every=0"
            raise ConfigError("gradient_checkpointing", True, hint)
        self.gradient_checkpointing = enable
        self.base_model.transformer.recompute(
            "block" if enable else "none",
            gradient_checkpointing_func,
            every_layers=every_n_layers,
        )

    def _move_missing_keys_from_meta_to_device(
        self, missing_keys: Collection[str], *args: Any, **kwargs: Any
    ) -> None:
        """Refuse a file that lacks weights; transformers would fill them with whatever is there.

        Nothing else has to be moved, since all weights have had values from the start.
        """
        lacking = sorted(set(missing_keys) - self.all_tied_weights_keys.keys())
        if lacking:
            more = f" and {len(lacking) - 1} more" if lacking[1:] else ""
            raise CheckpointError(f"the saved weights lack {lacking[0]}{more}")


class SlayformerModel(SlayformerPreTrainedModel):
    """The model up to its final norm."""

    def __init__(self, config: SlayformerConfig) -> None:
        super().__init__(config)
        dtype = torch.get_default_dtype()
        # values, in fp32, also where transformers would rather have none yet or fewer digits:
        # mechanisms compute theirs from draws, and their features from them in fp32
        with torch.device("cpu"), local_torch_dtype(torch.float32):
            self.transformer = GPT2(
                config.shape(),
                config.attention_options(),
                vocabulary_size=config.vocab_size,
                seed=config.seed,
            )
        for name, parameter in self.transformer.named_parameters():
            if ".attention." not in name:
                parameter.data = parameter.data.to(dtype)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the token embedding."""
        return self.transformer.token_embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Put another token embedding in place."""
        self.transformer.token_embedding = value
        self.transformer.vocabulary_size = value.num_embeddings
        self.transformer.padded_vocabulary_size = value.num_embeddings

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """Return the hidden states after the final norm [B, T, C], and the cache if one is used.

        `attention_mask` [B, T], or with a cache [B, tokens so far + T]: 0 for padding, which is
        neither seen nor counted. Positions count real tokens unless `position_ids` [B, T] are
        given; where those of a packed row, without mask and cache, do not go on by one, another
        document begins, which sees nothing of those before. A cache is used if it is given, or
        made if `use_cache` says so.

        Raises ConfigError for what does not exist here, ValueError beyond the context.
        """
        if output_attentions or self.config.output_attentions:
            raise ConfigError("output_attentions", True, "linear attention has no such matrix")
        batch_size, length = input_ids.shape
        if attention_mask is not None:
            shape = list(attention_mask.shape)
            if len(shape) != 2 or shape[1] < length:
                hint = f"must be of shape [batch, tokens], {length} tokens or more"
                raise ConfigError("attention_mask", shape, hint)
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        if cache is not None and use_cache is False:
            raise ConfigError("use_cache", False, "a cache was given; leave one of them out")
        mask_BT = None if attention_mask is None else attention_mask[:, -length:].bool()
        layers = None if cache is None else state_layers(cache, self.config.layers)
        states = None
        if layers is not None:
            states = self.transformer.init_states(batch_size, input_ids.device)
            if layers[0].state is not None:
                # each layer of a cache is reordered alone, so each holds what all share
                _, seen_B = layers[0].state
                states = ModelState([layer.state[0] for layer in layers], seen_B)
        document_ids_BT = None
        if position_ids is not None and mask_BT is None and states is None:
            last, context = int(position_ids.max()), self.config.context_length
            if last >= context:
                raise ValueError(f"position {last} is beyond the context of {context} tokens")
            document_ids_BT = _packed_documents(position_ids.expand_as(input_ids))
        hidden_BTC, after = self.transformer(
            input_ids,
            mask_BT=mask_BT,
            document_ids_BT=document_ids_BT,
            position_ids_BT=position_ids,
            states=states,
        )
        if layers is not None:
            for layer, state in zip(layers, after.layers, strict=True):
                layer.advance((state, after.seen_B), length)
        return BaseModelOutputWithPast(last_hidden_state=hidden_BTC, cache=cache)


def _packed_documents(position_ids_BT: Tensor) -> Tensor | None:
    """Return the number of each token's document in its row [B, T], None if rows are one each."""
    begins_BT = position_ids_BT.diff(dim=1) != 1
    if not begins_BT.any():
        return None
    return F.pad(begins_BT.long().cumsum(dim=1), (1, 0))


class SlayformerForCausalLM(SlayformerPreTrainedModel, GenerationMixin):
    """The language model: its head is the token embedding."""

    _tied_weights_keys = {  # noqa: RUF012
        "lm_head.weight": "model.transformer.token_embedding.weight"
    }
    # Trainer then counts the tokens of all accumulated batches, not the mean of their means
    accepts_loss_kwargs = True

    def __init__(self, config: SlayformerConfig) -> None:
        super().__init__(config)
        self.model = SlayformerModel(config)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, T, V] of the last `logits_to_keep` positions (0: all).

        With `labels` [B, T], which are the ids themselves and -100 where none counts, also the
        mean cross entropy in nats (the sum over `num_items_in_batch` if that is given). The other
        arguments and the errors are those of `SlayformerModel.forward`.
        """
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits,
                labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, cache=outputs.cache, hidden_states=outputs.hidden_states
        )

    def _prepare_generated_length(
        self, generation_config: GenerationConfig, *args: Any, input_ids_length: int, **kwargs: Any
    ) -> GenerationConfig:
        """Let generation end where the context ends, as `slayformer.model.generation` does."""
        context = self.config.context_length
        if input_ids_length >= context:
            hint = f"must be shorter than the model's context of {context} tokens"
            raise ConfigError("input_ids", f"{input_ids_length} tokens", hint)
        prepared = super()._prepare_generated_length(
            generation_config, *args, input_ids_length=input_ids_length, **kwargs
        )
        prepared.max_length = min(prepared.max_length, context)
        return prepared

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> None:
        """Refuse kinds of caches that hold keys and values in ways of their own."""
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ConfigError("cache_implementation", kind, "leave it out: states are small")
        super()._prepare_cache_for_generation(generation_config, *args, **kwargs)


# Trainer's label smoothing shifts the labels of the models listed there alone
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[SlayformerConfig.model_type] = SlayformerForCausalLM.__name__
AutoModel.register(SlayformerConfig, SlayformerModel)
AutoModelForCausalLM.register(SlayformerConfig, SlayformerForCausalLM)
