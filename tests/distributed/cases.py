"""The runs that one and two processes make, each world size in one launch, by name."""

from __future__ import annotations

from pathlib import Path

# 2 to 8 samples over 20 updates, then 8, then the 3 that are left
SIZES = [2] * 7 + [4] * 7 + [6] * 6 + [8] * 3 + [3]
RAMP = [
    *("batch.samples_per_update=8", "batch.micro_samples=2"),
    "batch.ramp={start_samples: 2, increment_samples: 2, updates: 20}",
    *("budget=samples", f"budget.samples={sum(SIZES)}"),
]
TWELVE = ["batch.samples_per_update=8", "budget=updates", "budget.updates=12"]
# (ZeRO stage, passes per update)
RESUMED = [(0, 1), (0, 4), (1, 4), (2, 1), (2, 4), (3, 4)]
# (ZeRO stage of the run, ZeRO stage of other processes that go on with it)
RESHAPED = [(0, 0), (1, 2), (2, 1), (3, 3), (0, 3), (3, 0)]
# in the middle of the ramp
RESHAPED_AT = 9
STAGES = (0, 1, 2, 3)
Z_LOSS = 0.05
# (what is recomputed, ZeRO stage)
RECOMPUTED = [("block", 0), ("attention", 1), ("block", 2), ("attention", 3), ("block", 3)]


def cases(tiny: list[str], folder: Path, world_size: int) -> dict[str, list[str]]:
    """Return the overrides of every run that the tests compare, by name."""
    runs = {
        **compared_with_plain_loop(folder),
        **compared_with_one_another(folder, world_size),
    }
    # stage 3 last: from then on DeepSpeed has its own linear layer for the whole process, which
    # rounds fp16 products in another place
    last = "engine.zero_stage=3"
    names = sorted(runs, key=lambda name: last in runs[name])
    return {name: [*tiny, *runs[name]] for name in names}


def compared_with_plain_loop(folder: Path) -> dict[str, list[str]]:
    """Return the runs over the ramp, with every option that changes an update."""
    runs = {}
    for stage in STAGES:
        zero = f"engine.zero_stage={stage}"
        runs[f"ramp-{stage}"] = [zero, f"checkpoint.every_updates={RESHAPED_AT}"]
        runs[f"fp16-{stage}"] = [zero, "engine.precision=fp16"]
        if stage > 0:
            runs[f"offload-{stage}"] = [zero, "engine.offload_optimizer=true"]
        skip = "bad_updates.not_finite=skip"
        runs[f"nan_loss-{stage}"] = [zero, skip]
        if stage in (0, 2):
            runs[f"nan_gradient-{stage}"] = [zero, skip]
            runs[f"nan_loss_fp16-{stage}"] = [zero, skip, "engine.precision=fp16"]
            runs[f"spike-{stage}"] = [zero, "bad_updates.spike_factor=2"]
            runs[f"unclipped-{stage}"] = [zero, "optimizer.gradient_clipping=0"]
            # parameter groups of several learning rates
            runs[f"learned-{stage}"] = [zero, "attention=slay_best", "attention.local_size=4"]
            runs[f"learned-{stage}"] += ["attention.far_scale=1", "attention.last_far_scale=null"]
        if stage in (0, 3):
            runs[f"z_loss-{stage}"] = [zero, f"optimizer.z_loss={Z_LOSS}"]
    for what, stage in RECOMPUTED:
        again = [f"engine.zero_stage={stage}", f"engine.activation_checkpointing={what}"]
        runs[f"{what}-{stage}"] = again
    # dropout draws the same numbers the second time
    runs["dropout"] = ["engine.zero_stage=3", "model.dropout=0.1"]
    runs["dropout_block"] = [*runs["dropout"], "engine.activation_checkpointing=block"]
    by_tokens = ["schedule=wsd", "schedule.unit=tokens", "schedule.decay_share=0.5"]
    runs["by_tokens-2"] = ["engine.zero_stage=2", *by_tokens, "schedule.warmup_updates=3"]
    runs["signed"] = ["attention=slay_random_maclaurin"]
    runs["bf16-2"] = ["engine.zero_stage=2", "engine.precision=bf16"]
    runs["deepspeed-2"] = [
        "engine.zero_stage=2",
        # a bucket smaller than the model: gradients are reduced in many pieces
        "engine.deepspeed={zero_optimization: {reduce_bucket_size: 5000}}",
    ]
    runs |= {"wandb": ["logging.wandb=offline"], "broken_wandb": ["logging.wandb=offline"]}
    # nobody can make a folder beneath a file
    (folder / "broken_wandb").mkdir()
    (folder / "broken_wandb" / "wandb").write_text("")
    for name in ("fp16-1", "offload-2"):
        saved = folder / name / "checkpoints" / f"update_{RESHAPED_AT:07d}"
        runs[f"resumed-{name}"] = [*runs[name], f"resume={saved}"]
        runs[name] = [*runs[name], f"checkpoint.every_updates={RESHAPED_AT}"]
    return {name: [*RAMP, *overrides] for name, overrides in runs.items()}


def compared_with_one_another(folder: Path, world_size: int) -> dict[str, list[str]]:
    """Return runs of one batch size with dropout, and others that go on from their middle."""
    runs = {}
    for stage, passes in RESUMED:
        overrides = [
            *(*TWELVE, "model.dropout=0.1", f"engine.zero_stage={stage}"),
            f"batch.micro_samples={8 // world_size // passes}",
        ]
        whole = f"whole-{stage}-{passes}"
        runs[whole] = [*overrides, "checkpoint.every_updates=6"]
        saved = folder / whole / "checkpoints" / "update_0000006"
        runs[f"resumed-{stage}-{passes}"] = [*overrides, f"resume={saved}"]
    runs["finished"] = [*runs["whole-2-4"], f"resume={folder / 'whole-2-4'}"]
    return runs


def reshaped_runs(tiny: list[str], folder: Path) -> dict[str, list[str]]:
    """Return runs of other processes that go on from the checkpoints in `folder`."""
    runs = {}
    for was, now in RESHAPED:
        saved = folder / f"ramp-{was}" / "checkpoints" / f"update_{RESHAPED_AT:07d}"
        options = [f"engine.zero_stage={now}", f"resume={saved}"]
        runs[f"{was}-to-{now}"] = [*tiny, *RAMP, *options]
    return runs
