"""Plans against numbers worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from slayformer.cli import compose
from slayformer.config import (
    BatchConfig,
    BudgetConfig,
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    RampConfig,
    ScheduleConfig,
    SourceConfig,
    TokenizerConfig,
    TrainConfig,
    ValidationConfig,
)
from slayformer.config_loading import load_config
from slayformer.errors import ConfigError
from slayformer.training.budget import make_plan, parameter_counts

GPT2_SMALL = ModelConfig(layers=12, heads=12, width=768, context_length=1024)


def config(
    batch: BatchConfig, budget: BudgetConfig, model: ModelConfig = GPT2_SMALL
) -> TrainConfig:
    return TrainConfig(
        attention=None,
        model=model,
        tokenizer=TokenizerConfig("gpt2"),
        data=DataConfig(SourceConfig("sotu")),
        batch=batch,
        optimizer=OptimizerConfig(learning_rate=1e-4, weight_decay=0.01),
        schedule=ScheduleConfig("linear", warmup_updates=500),
        budget=budget,
        engine=EngineConfig(zero_stage=2, precision="bf16"),
        validation=ValidationConfig(every_updates=0, tokens=1024),
        checkpoint=CheckpointConfig(every_updates=0),
        logging=LoggingConfig(every_updates=1, sample_prompt="a", sample_tokens=1),
    )


def test_gpt2_small_has_the_published_parameters() -> None:
    counts = parameter_counts(GPT2_SMALL, 50257)
    # OpenAI's 124M checkpoint; without wte (50257 x 768) and wpe (1024 x 768) 85,056,000 are left
    assert counts.total == 124_439_808
    assert counts.non_embedding == 85_056_000
    # GPT-2 medium, 355M
    medium = ModelConfig(layers=24, heads=16, width=1024, context_length=1024)
    assert parameter_counts(medium, 50257).total == 354_823_168


def test_chinchilla_on_eight_devices_ends_with_a_partial_update() -> None:
    batch = BatchConfig(micro_samples=8, samples_per_device=32)
    plan = make_plan(config(batch, BudgetConfig(tokens_per_parameter=20)), 50257, 8)
    assert plan.tokens == 2_488_796_160
    # 2,488,796,160 / 1024 exactly
    assert plan.samples == 2_430_465
    # 9494 x 256 = 2,430,464: one sample is left
    assert plan.updates == 9_495
    assert len(plan.samples_of(9_493)) == 256
    assert plan.samples_of(9_494) == range(2_430_464, 2_430_465)
    assert plan.segments[0].accumulation == 4
    assert plan.tokens_at(plan.updates) == 2_488_796_160


def test_non_embedding_budget_counts_fewer_tokens() -> None:
    batch = BatchConfig(micro_samples=8, samples_per_device=32)
    budget = BudgetConfig(tokens_per_parameter=20, parameters="non_embedding")
    assert make_plan(config(batch, budget), 50257, 8).tokens == 1_701_120_000


def test_ramp_of_the_paper_on_eight_devices() -> None:
    batch = BatchConfig(8, samples_per_device=32, ramp=RampConfig(8, 8, 500))
    plan = make_plan(config(batch, BudgetConfig(tokens_per_parameter=20)), 50257, 8)
    # steps of 64 at u x 3 / 500 = 1, 2, 3, that is from updates 167, 334 and 500 on
    sizes = {u: len(plan.samples_of(u)) for u in (0, 166, 167, 333, 334, 499, 500, 9_743)}
    assert sizes == {0: 64, 166: 64, 167: 128, 333: 128, 334: 192, 499: 192, 500: 256, 9_743: 256}
    # 167 x 64 + 167 x 128 + 166 x 192
    assert plan.samples_at(500) == 63_936
    # (2,430,465 - 63,936) / 256 = 9244 and a rest of 65
    assert plan.updates == 500 + 9_245
    assert len(plan.samples_of(9_744)) == 65
    assert [segment.accumulation for segment in plan.segments] == [1, 2, 3, 4]


def test_ramp_follows_its_formula_at_every_update() -> None:
    model = replace(GPT2_SMALL, context_length=16)
    for updates, start, increment, full in (
        (20, 2, 2, 8),
        (7, 1, 1, 13),
        (3, 2, 2, 16),
        (1, 4, 4, 8),
    ):
        ramp = RampConfig(start, increment, updates)
        batch = BatchConfig(2, samples_per_update=full, ramp=ramp)
        plan = make_plan(config(batch, BudgetConfig(updates=30), model), 257, 1)
        steps, seen = (full - start) // increment, 0
        for update in range(30):
            expected = start + increment * (update * steps // updates)
            expected = full if update >= updates else expected
            assert plan.samples_at(update) == seen
            assert len(plan.samples_of(update)) == expected
            seen += expected
        assert plan.updates == 30
        assert plan.samples == seen


def test_ramp_over_samples_follows_its_formula_at_every_update() -> None:
    model = replace(GPT2_SMALL, context_length=16)
    for samples, start, increment, full in (
        (60, 2, 2, 8),
        (1, 1, 1, 13),
        (100, 2, 2, 16),
        (7, 4, 4, 8),
    ):
        ramp = RampConfig(start, increment, samples=samples)
        batch = BatchConfig(2, samples_per_update=full, ramp=ramp)
        plan = make_plan(config(batch, BudgetConfig(updates=40), model), 257, 1)
        steps, seen = (full - start) // increment, 0
        for update in range(40):
            assert plan.samples_at(update) == seen
            expected = start + increment * min(steps, seen * steps // samples)
            assert len(plan.samples_of(update)) == expected
            seen += expected
    # 2 → 8 over 60 samples: 10 updates of 2 see 20 samples, 5 of 4 see 40, 4 of 6 see 64
    ramp = RampConfig(2, 2, samples=60)
    batch = BatchConfig(2, samples_per_update=8, ramp=ramp)
    plan = make_plan(config(batch, BudgetConfig(samples=100), model), 257, 1)
    assert [segment.updates for segment in plan.segments] == [10, 5, 4, 5]
    assert [segment.accumulation for segment in plan.segments] == [1, 2, 3, 4]


def test_run_that_ends_within_the_ramp() -> None:
    batch = BatchConfig(2, samples_per_update=8, ramp=RampConfig(2, 2, 30))
    plan = make_plan(config(batch, BudgetConfig(samples=31)), 50257, 1)
    # ten updates of 2, then 4, 4 and the last 3
    assert plan.updates == 13
    assert [len(plan.samples_of(u)) for u in (9, 10, 11, 12)] == [2, 4, 4, 3]


def test_tokens_are_rounded_up_to_whole_samples() -> None:
    batch = BatchConfig(8, samples_per_update=16)
    plan = make_plan(config(batch, BudgetConfig(tokens=1_000_001)), 50257, 1)
    assert (plan.samples, plan.updates) == (977, 62)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_share_an_update_without_gap_or_overlap(world_size: int) -> None:
    batch = BatchConfig(3, samples_per_device=8)
    plan = make_plan(config(batch, BudgetConfig(samples=8 * world_size + 5)), 50257, world_size)
    assert plan.updates == 2
    for update in range(2):
        shares = [plan.micro_batches(update, rank) for rank in range(world_size)]
        taken = [i for share in shares for part in share for i in part.samples]
        assert taken == list(plan.samples_of(update))
        # the same passes of the same size on every rank, none above micro_samples
        sizes = [[len(part.samples) + part.padding for part in share] for share in shares]
        assert all(size == sizes[0] for size in sizes)
        assert max(sizes[0]) <= 3
    assert [len(part.samples) for part in plan.micro_batches(0, 0)] == [3, 3, 2]
    # 5 samples of the last update over all ranks, rounded up
    padding = sum(p.padding for rank in range(world_size) for p in plan.micro_batches(1, rank))
    assert padding == -5 % world_size


@pytest.mark.parametrize(
    ("batch", "field", "nearest"),
    [
        (BatchConfig(2, samples_per_update=16), "batch.samples_per_update", "15 or 18"),
        (BatchConfig(2, samples_per_update=2), "batch.samples_per_update", "use 3"),
        (
            BatchConfig(2, samples_per_update=12, ramp=RampConfig(4, 4, 5)),
            "batch.ramp.start_samples",
            "3 or 6",
        ),
        (
            BatchConfig(2, samples_per_update=12, ramp=RampConfig(6, 2, 5)),
            "batch.ramp.increment_samples",
            "use 3",
        ),
    ],
)
def test_batch_that_devices_cannot_share(batch: BatchConfig, field: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(config(batch, BudgetConfig(updates=3)), 50257, 3)
    assert caught.value.field == field
    assert nearest in str(caught.value)


def shared_by(ranks: int) -> TrainConfig:
    plain = config(BatchConfig(2, samples_per_device=8), BudgetConfig(samples=37))
    return replace(plain, engine=replace(plain.engine, context_parallel=ranks))


@pytest.mark.parametrize(("ranks", "groups"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_devices_that_share_a_sequence_count_as_one(ranks: int, groups: int) -> None:
    plan = make_plan(shared_by(ranks), 50257, 6)
    assert (plan.world_size, plan.context_parallel, plan.data_parallel) == (6, ranks, groups)
    (segment,) = plan.segments
    assert (segment.samples_per_update, segment.accumulation) == (8 * groups, 4)
    taken = [
        i
        for update in range(plan.updates)
        for group in range(groups)
        for part in plan.micro_batches(update, group)
        for i in part.samples
    ]
    assert taken == list(range(37))


@pytest.mark.parametrize(
    ("ranks", "world_size", "message"),
    [
        (4, 6, r"context_parallel=4: must divide the 6 processes; use one of 1, 2, 3, 6"),
        (2, 1, r"context_parallel=2: needs 2 processes or a multiple, and there are 1: .*SIZE=2"),
    ],
)
def test_a_context_that_devices_cannot_share(ranks: int, world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(shared_by(ranks), 50257, world_size)


def test_plan_is_json() -> None:
    batch = BatchConfig(8, samples_per_device=32, ramp=RampConfig(8, 8, 500))
    plan = make_plan(config(batch, BudgetConfig(tokens_per_parameter=20)), 50257, 8)
    plain = json.loads(json.dumps(plan.to_plain()))
    assert plain["updates"] == 9_745
    assert plain["parameters"]["total"] == 124_439_808
    assert plain["segments"][1]["samples_per_update"] == 128


def test_samples_at_refuses_updates_outside_the_plan() -> None:
    plan = make_plan(config(BatchConfig(1, samples_per_update=1), BudgetConfig(updates=2)), 257, 1)
    with pytest.raises(ValueError, match="outside"):
        plan.samples_at(3)


def test_only_a_run_of_whole_updates_can_be_made_longer() -> None:
    batch = BatchConfig(samples_per_update=8, micro_samples=8)
    for samples, partial in ((16, False), (17, True), (7, True)):
        budget = BudgetConfig(samples=samples)
        assert make_plan(config(batch, budget), 50257, 1).ends_partially is partial
    # what the pages say of the quick start
    for options, updates in (([], 100), (["budget.tokens=819200"], 200)):
        plan = make_plan(load_config(compose("train", options)), 50257, 1)
        assert (plan.updates, plan.ends_partially) == (updates, False)
