"""Paired differences: against hand-computed and textbook intervals, and by simulated coverage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from slayformer.evaluation.document_losses import DocumentLosses
from slayformer.evaluation.paired import by_document, interval_half_width, paired_difference
from slayformer.evaluation.runs import Run


def run(mechanism: str, seed: int, loss: float, documents: DocumentLosses | None = None) -> Run:
    return Run(Path("x"), mechanism, seed, {"validation_loss": loss}, {}, [], "", {}, {}, documents)


def document_run(mechanism: str, seed: int, loss_D: list[float], tokens_D: list[int]) -> Run:
    nats_D = np.array(loss_D) * tokens_D
    losses = DocumentLosses(nats_D, np.array(tokens_D))
    return run(mechanism, seed, float(nats_D.sum() / sum(tokens_D)), losses)


def test_one_seed_is_the_paired_t_test_over_documents() -> None:
    ours, theirs = [3.0, 2.5, 4.0, 3.2], [3.1, 2.4, 4.3, 3.6]
    found = paired_difference(
        [document_run("slay", 1, ours, [10] * 4)], [document_run("softmax", 1, theirs, [10] * 4)]
    )
    expected = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert found is not None
    assert found.half_width is not None
    assert found.mean - found.half_width == pytest.approx(expected.low, rel=1e-12)
    assert found.mean + found.half_width == pytest.approx(expected.high, rel=1e-12)
    assert (found.seeds, found.documents, found.covers) == ([1], 4, "documents")


def test_without_documents_it_is_the_paired_t_test_over_common_seeds() -> None:
    ours, theirs = {1: 3.0, 2: 3.2, 3: 3.4, 5: 9.0}, {1: 3.3, 2: 3.4, 3: 3.9, 4: 1.0}
    found = paired_difference(
        [run("slay", seed, loss) for seed, loss in ours.items()],
        [run("softmax", seed, loss) for seed, loss in theirs.items()],
    )
    expected = stats.ttest_rel([3.0, 3.2, 3.4], [3.3, 3.4, 3.9]).confidence_interval(0.95)
    assert found is not None
    assert found.half_width is not None
    assert found.mean + found.half_width == pytest.approx(expected.high, rel=1e-12)
    assert (found.seeds, found.documents, found.covers) == ([1, 2, 3], 0, "seeds")
    assert paired_difference([run("slay", 5, 1.0)], [run("softmax", 4, 1.0)]) is None
    alone = paired_difference([run("slay", 1, 3.0)], [run("softmax", 1, 3.5)])
    assert alone is not None
    assert (alone.mean, alone.half_width, alone.covers) == (-0.5, None, "nothing")


def test_documents_have_to_be_the_same() -> None:
    ours = [document_run("slay", seed, [3.0, 2.0], [10, 20]) for seed in (1, 2)]
    theirs = [document_run("softmax", seed, [3.0, 2.5], [10, 20]) for seed in (1, 2)]
    both = paired_difference(ours, theirs)
    assert both is not None
    assert (both.documents, both.covers) == (2, "seeds and documents")
    others = [theirs[0], document_run("softmax", 2, [3.0, 2.5], [11, 19])]
    unlike = paired_difference(ours, others)
    assert unlike is not None
    assert (unlike.documents, unlike.covers) == (0, "seeds")
    old = paired_difference(ours, [theirs[0], replace(theirs[1], documents=None)])
    assert old is not None
    assert (old.documents, old.covers) == (0, "seeds")


def test_long_documents_weigh_more() -> None:
    ours = DocumentLosses(np.array([30.0, 300.0, 12.0]), np.array([10, 100, 5]))
    theirs = DocumentLosses(np.array([20.0, 310.0, 12.5]), np.array([10, 100, 5]))
    part_D = by_document(ours, theirs)
    # (10 − 10 − 0.5) nats over 115 tokens
    ratio = -0.5 / 115
    assert part_D.mean() == pytest.approx(ratio, rel=1e-12)
    # the textbook variance of a ratio of means: residuals over the mean size
    residual_D = np.array([10.0, -10.0, -0.5]) - ratio * np.array([10, 100, 5])
    expected = residual_D.var(ddof=1) / 3 / (115 / 3) ** 2
    assert part_D.var(ddof=1) / 3 == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("spreads", [(0.02, 0.2, 0.1), (0.1, 0.01, 0.3), (0.0, 0.3, 0.0)])
@pytest.mark.parametrize("shape", [(3, 40), (5, 12), (1, 40)])
def test_the_interval_covers_the_true_mean_as_often_as_it_says(
    shape: tuple[int, int], spreads: tuple[float, float, float]
) -> None:
    draw = np.random.default_rng(shape[0])
    of_seed, of_document, of_both = spreads
    if shape[0] == 1:
        # one seed says nothing of others
        of_seed = 0.0
    covered, trials = 0, 1500
    for _ in range(trials):
        sample_SD = 0.7 + (
            of_seed * draw.standard_normal((shape[0], 1))
            + of_document * draw.standard_normal((1, shape[1]))
            + of_both * draw.standard_normal(shape)
        )
        half_width = interval_half_width(sample_SD)
        assert half_width is not None
        covered += abs(sample_SD.mean() - 0.7) <= half_width
    # 95 %, within what the docstring says and three standard errors of the count
    assert 0.915 <= covered / trials <= 0.995


def test_equal_runs_have_no_width() -> None:
    assert interval_half_width(np.full((2, 3), 0.5)) == 0.0
    assert interval_half_width(np.full((1, 1), 0.5)) is None
