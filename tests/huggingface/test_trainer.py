"""transformers' Trainer: a few steps against a plain loop, and its checkpoint loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="Trainer needs it: pip install accelerate")


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer_does_what_a_plain_loop_does(accumulation: int, tiny: Any, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from slayformer.huggingface import SlayformerForCausalLM

    draw = torch.Generator().manual_seed(2)
    rows = torch.randint(1, 211, (16, 24), generator=draw)
    labels = rows.clone()
    # rows of different lengths, which a mean of means would weigh wrongly
    for row in range(16):
        labels[row, : row + 1] = -100
    data = [{"input_ids": a, "labels": b} for a, b in zip(rows, labels, strict=True)]

    model, plain = tiny("slay"), tiny("slay")
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
        activation_checkpointing=accumulation == 2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        weight_decay=0.0,
        max_grad_norm=0.0,
        save_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        eval_strategy="steps",
        eval_steps=4,
        train_sampling_strategy="sequential",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
    trainer.train()

    plain.train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    for start in range(0, 16, 4):
        logits = plain(rows[start : start + 4]).logits
        targets = labels[start : start + 4, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=name)
    loaded = SlayformerForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    with torch.no_grad():
        assert torch.equal(loaded(rows).logits, model.eval()(rows).logits)
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluated) == 1


def test_label_smoothing_scores_the_next_token(
    tiny: Any, ids: torch.Tensor, tmp_path: Path
) -> None:
    """Trainer shifts labels for the models it knows to be causal; transformers' GPT-2 is one."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path), label_smoothing_factor=0.1, use_cpu=True, report_to=[]
    )
    theirs = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=211)).eval()
    for model in (theirs, tiny("softmax")):
        trainer = Trainer(model=model, args=arguments)
        with torch.no_grad():
            told = trainer.compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
            logits = model(ids).logits[:, :-1]
        # torch's smoothing spreads 0.1 over all classes, as Trainer's does
        expected = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1
        )
        torch.testing.assert_close(told, expected, rtol=1e-5, atol=0)
