"""`import slayformer` alone: light, and enough for transformers' Auto classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slayformer.huggingface import SlayformerForCausalLM, fast_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model of the bytes tokenizer and that tokenizer."""
    from slayformer.data.tokenizer import BytesTokenizer
    from slayformer.huggingface import SlayformerConfig

    folder = tmp_path_factory.mktemp("saved") / "model"
    shape = {"layers": 2, "heads": 2, "width": 16, "context_length": 64}
    ends = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    config = SlayformerConfig(attention="slay", vocab_size=257, **shape, **ends)
    SlayformerForCausalLM(config).save_pretrained(folder)
    fast_tokenizer(BytesTokenizer(), context_length=64).save_pretrained(folder)
    return folder


def logits(folder: Path) -> str:
    model = SlayformerForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return str(model(torch.tensor([[72, 105]])).logits[0, -1, :3].tolist())


def test_importing_slayformer_imports_neither_torch_nor_transformers(run_command: Any) -> None:
    program = """
import sys, slayformer, slayformer.huggingface
print({"torch", "transformers", "omegaconf", "numpy"} & set(sys.modules))
"""
    finished = run_command(["-c", program])
    assert finished.stdout == "set()\n", finished.stderr


PROGRAMS = {
    "slayformer first": """
import slayformer
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
assert AutoConfig.from_pretrained(FOLDER).attention["nodes"] == 3
assert type(AutoModel.from_pretrained(FOLDER)).__name__ == "SlayformerModel"
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER)
text = pipeline("text-generation", model=FOLDER)("Hi", max_new_tokens=3, do_sample=False)
ids = model.generate(**tokenizer("Hi", return_tensors="pt"), max_new_tokens=3, do_sample=False)
assert text == [{"generated_text": tokenizer.decode(ids[0], skip_special_tokens=True)}], text
# several prompts of different lengths at once, and more than the context holds
many = pipeline("text-generation", model=FOLDER, batch_size=2)(["Hi", "Good day"], do_sample=False)
assert many[0][0]["generated_text"].startswith(text[0]["generated_text"])
""",
    "transformers first": """
from transformers import AutoModelForCausalLM, AutoTokenizer
import slayformer
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER)
""",
    "never imported": """
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("order", PROGRAMS)
def test_auto_classes_load_in_a_new_process(
    order: str, run_command: Any, saved: Path, tmp_path: Path
) -> None:
    program = f"""
FOLDER = {str(saved)!r}
{PROGRAMS[order]}
import torch
assert tokenizer("Hi")["input_ids"] == [72, 105]
print(model(torch.tensor([[72, 105]])).logits[0, -1, :3].tolist())
"""
    finished = run_command(["-c", program], env={"HF_HOME": str(tmp_path)})
    assert finished.code == 0, finished.stderr
    assert finished.stdout == logits(saved) + "\n"
