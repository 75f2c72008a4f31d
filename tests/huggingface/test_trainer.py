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
