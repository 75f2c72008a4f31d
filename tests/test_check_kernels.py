"""scripts/check_kernels.py compiles what training would run, and judges it."""

from __future__ import annotations

import pytest


@pytest.mark.slow
def test_kernels_of_one_case_fit_a_gpu_that_is_not_there(run_command) -> None:
    pytest.importorskip("triton")
    arguments = ["--mechanisms", "slay", "--widths", "64", "--architectures", "90"]
    done = run_command(["scripts/check_kernels.py", *arguments], timeout_s=900)
    assert done.code == 0, done.stdout + done.stderr
    for name in (
        "carry_states",
        "chunk_outputs",
        "pairs_backward",
        "states_backward",
        "step_forward",
    ):
        assert name in done.stdout
    assert "without spills" in done.stdout


def test_it_ends_with_a_sentence_for_a_mistake(run_command) -> None:
    done = run_command(["scripts/check_kernels.py", "--mechanisms", "slay_bset"])
    assert done.code == 2
    assert done.stderr.startswith("error: ")
    assert "slay_best" in done.stderr
