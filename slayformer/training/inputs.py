"""What a run reads: training samples, the fixed validation windows, the prompt of its samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from slayformer.config import TrainConfig
from slayformer.data.loader import Batch, WindowLoader
from slayformer.data.prepare import PreparedData, open_prepared, prepare
from slayformer.data.shards import TokenStream
from slayformer.data.tokenizer import Tokenizer
from slayformer.data.unigram import unigram_cross_entropy
from slayformer.evaluation.loss import validation_windows
from slayformer.training import distributed
from slayformer.training.budget import MicroBatch
from slayformer.training.objective import IGNORE_INDEX

# beside the shards
TRAIN_COUNTS = "train_counts.npy"


@dataclass(frozen=True)
class Inputs:
    """Prepared tokens and their loaders. `windows` counts the validation windows in use.

    `prompt` holds the token ids that samples continue, at most half a context; empty: no samples.
    """

    data: PreparedData
    train: WindowLoader
    validation: WindowLoader
    windows: int
    prompt: list[int]
    context_length: int

    def micro_batch(self, wanted: MicroBatch, padding_sample: int) -> Batch:
        """Return the batch of a forward pass, of its sequences the stretch this process holds.

        Padding repeats `padding_sample` without any target.
        """
        batch = self.train.batch([*wanted.samples, *[padding_sample] * wanted.padding])
        batch.targets_BT[len(wanted.samples) :] = IGNORE_INDEX
        return batch.stretch(distributed.own_stretch(self.context_length))

    def unigram_loss(self) -> float:
        """Return nats per validation token under the frequencies of the training tokens."""

        def targets() -> Iterator[np.ndarray]:
            for window in range(self.windows):
                start = window * self.context_length + 1
                yield self.data.validation.read(start, self.context_length)

        size = self.data.tokenizer.vocabulary_size
        kept = self.data.directory / TRAIN_COUNTS
        return unigram_cross_entropy(self.data.train, targets(), size, kept)


def open_inputs(config: TrainConfig) -> Inputs:
    """Prepare the data on rank 0, then open it on every rank.

    Raises UserError if the data cannot be had or is too little.
    """
    directory = distributed.run_on_main(lambda: prepare(config.data, config.tokenizer).directory)
    # rank 0 has verified it
    prepared = open_prepared(directory, verify=False)
    context_length = config.model.context_length

    def loader(stream: TokenStream, seed: int | None) -> WindowLoader:
        return WindowLoader(
            stream,
            context_length=context_length,
            seed=seed,
            end_of_text=prepared.tokenizer.end_of_text,
            isolate_documents=config.data.isolate_documents,
        )

    validation = loader(prepared.validation, None)
    return Inputs(
        data=prepared,
        train=loader(prepared.train, config.seed),
        validation=validation,
        windows=validation_windows(validation, config.validation.tokens, context_length),
        prompt=_prompt_ids(config, prepared.tokenizer),
        context_length=context_length,
    )


def _prompt_ids(config: TrainConfig, tokenizer: Tokenizer) -> list[int]:
    if config.logging.sample_tokens == 0 or config.model.context_length < 2:
        return []
    ids = tokenizer.encode(config.logging.sample_prompt) or [tokenizer.end_of_text]
    # leave half of a small context to the continuation
    return ids[-max(1, config.model.context_length // 2) :]
