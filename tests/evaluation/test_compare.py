"""The comparison: what it asks of runs, what it refuses, and that none is lost or repeated."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import Progress

from slayformer.cli import COMMANDS, CONFIGURATIONS, compose
from slayformer.config import TrainConfig
from slayformer.config_commands import CompareConfig, RecallConfig
from slayformer.config_loading import load_config
from slayformer.errors import ConfigError, UserError
from slayformer.evaluation.cells import RunningCell, display, interruptible
from slayformer.evaluation.compare import (
    SETTINGS_FILE,
    join_record,
    plan_cells,
    read_config,
    run,
    split_arguments,
)
from slayformer.evaluation.document_losses import read_document_losses
from slayformer.paper.published import TABLE_5

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 400
SMALL = [
    *("model.layers=1", "model.heads=2", "model.width=8", "model.context_length=16"),
    *("tokenizer=bytes", "data=text", "data.source.path=documents"),
]


def request(**changes: object) -> CompareConfig:
    """Return a comparison of two mechanisms and two seeds, with `changes`."""
    values = {"attention": ["softmax", "slay"], "seeds": [1, 2], **changes}
    return load_config(OmegaConf.create(values), CompareConfig)


def test_arguments_reach_the_comparison_or_every_run() -> None:
    own, overrides = split_arguments(
        [
            *("attention=[softmax,slay]", "model.width=64", "seeds=[1]", "--cfg", "jobs=2"),
            *("+experiment=gpt2_small_chinchilla", "attention.delta=1e-5", "threads=1"),
        ]
    )
    assert own == ["attention=[softmax,slay]", "seeds=[1]", "--cfg", "jobs=2", "threads=1"]
    assert overrides == [
        *("model.width=64", "+experiment=gpt2_small_chinchilla", "attention.delta=1e-5"),
    ]


def test_an_experiment_may_name_mechanisms_and_seeds() -> None:
    own, overrides = split_arguments(["experiment=table5_cpu", "seeds=[7]"])
    assert (own, overrides) == (["seeds=[7]", "experiment=table5_cpu"], ["experiment=table5_cpu"])
    config = load_config(compose("compare", own, folder=COMMANDS), CompareConfig)
    assert {*config.attention} == {*TABLE_5, "slay_best"}
    assert config.seeds == [7]
    # its runs are those of the experiment it stands for
    for name, other in (("table5_cpu", "cpu_race"), ("table5", "gpt2_small_chinchilla")):
        assert compose("train", [f"experiment={name}"]) == compose("train", [f"experiment={other}"])


def test_one_value_stands_for_a_list_and_all_for_every_mechanism() -> None:
    config = read_config(compose("compare", ["attention=slay", "seeds=7"], folder=COMMANDS))
    assert (config.attention, config.seeds) == (["slay"], [7])
    config = read_config(compose("compare", ["attention=all"], folder=COMMANDS))
    assert config.attention == sorted(
        path.stem for path in CONFIGURATIONS.joinpath("attention").iterdir()
    )
    with pytest.raises(ConfigError, match="seeds=true: must be a list"):
        read_config(compose("compare", ["seeds=true"], folder=COMMANDS))


def test_cells_differ_in_mechanism_seed_and_folder_alone(tmp_path: Path) -> None:
    # a name that Hydra's grammar would take apart
    directory = tmp_path / "it's, a {test}=1"
    cells = plan_cells(request(), SMALL, directory)
    assert [cell.title for cell in cells] == [
        *("softmax seed 1", "slay seed 1", "softmax seed 2", "slay seed 2"),
    ]
    for cell in cells:
        mechanism, seed = cell.config.attention.name, cell.config.seed
        assert cell.title == f"{mechanism} seed {seed}"
        assert cell.config.run_directory == str(directory / f"{mechanism}-seed{seed}")
        assert type(cell.config.attention).__name__.lower().startswith(mechanism)
        assert cell.config.model == cells[0].config.model
        assert isinstance(cell.config, TrainConfig)
        assert (cell.config.model.width, cell.config.data.source.path) == (8, "documents")


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        ({}, ["seed=3"], "seed=3: name the seeds"),
        ({}, ["run_directory=x"], "run_directory=x: set directory="),
        ({}, ["resume=auto"], "resume=auto: "),
        ({}, ["+dry_run=true"], "dry_run=true: "),
        ({"attention": []}, [], "attention=\\[\\]: name at least one"),
        ({"seeds": [1, 2, 1]}, [], "seeds=\\[1, 2, 1\\]: .*each once"),
        ({"seeds": [-1]}, [], "seed=-1: must be"),
        ({"baseline": "sley"}, [], "baseline=sley: .*did you mean slay"),
        ({"jobs": 2, "processes": 2}, [], "jobs=2: .*processes=.*jobs=1"),
        ({}, ["model.width=7"], "model.heads=2"),
        ({}, ["schedule.warmup_updates=99999"], "schedule.warmup_updates=99999"),
    ],
)
def test_what_cannot_work_is_refused_before_any_run(
    tmp_path: Path, changes: dict, overrides: list[str], message: str
) -> None:
    directory = tmp_path / "comparison"
    with pytest.raises(ConfigError, match=message):
        run(request(directory=str(directory), **changes), [*SMALL, *overrides])
    assert not directory.exists()


def test_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="without a launcher"):
        run(request(), SMALL)


def test_a_folder_belongs_to_one_comparison(tmp_path: Path) -> None:
    def claim(overrides: list[str], **changes: object) -> None:
        cells = plan_cells(request(**changes), [*SMALL, *overrides], tmp_path)
        (tmp_path / SETTINGS_FILE).write_text(json.dumps(join_record(tmp_path, cells)))

    claim([])
    claim([])
    with pytest.raises(ConfigError, match=r"model\.width=16: .* was made with 8"):
        claim(["model.width=16"])
    # more mechanisms and seeds may join, and the earlier ones are not forgotten
    claim([], attention=["linear_elu"], seeds=[3])
    with pytest.raises(ConfigError, match=r"attention\.slay\.epsilon=0\.5: .* made with 0\.001"):
        claim(["attention.epsilon=0.5"], attention=["slay"])
    claim([], attention=["slay", "linear_elu"], seeds=[4])
    # what says nothing of training may change, and the way a path is written
    claim(["logging.every_updates=2", "data.workers=1", "engine.timeout_seconds=60"])
    claim([f"data.source.path={Path('documents').absolute()}"])
    with pytest.raises(ConfigError, match=r"prescale_gradients=true: .* made with null"):
        claim(["engine.deepspeed={prescale_gradients: true}"])
    # as versions wrote it that kept paths as they were given, and null for no recall
    record = json.loads((tmp_path / SETTINGS_FILE).read_text())
    record["shared"]["data"]["source"]["path"] = "documents"
    (tmp_path / SETTINGS_FILE).write_text(json.dumps({**record, "recall": None}))
    claim([], recall=True)
    with pytest.raises(ConfigError, match=r"processes=2: .* made with 1; choose another dir"):
        claim([], processes=2)


def test_recall_runs_beside_training(tmp_path: Path) -> None:
    wanted = [*SMALL, "attention.delta=1e-5", "recall.updates=70"]
    cells = plan_cells(request(attention=["slay"], recall=True), wanted, tmp_path)
    assert [cell.title for cell in cells] == [
        *("slay seed 1", "slay recall seed 1", "slay seed 2", "slay recall seed 2"),
    ]
    training, recall = (cell.config for cell in cells[:2])
    assert isinstance(recall, RecallConfig)
    assert recall.updates == 70
    assert recall.run_directory == str(tmp_path / "slay-recall-seed1")
    assert recall.attention == training.attention
    assert recall.attention.delta == 1e-5
    with pytest.raises(ConfigError, match=r"recall\.updates=70: set recall=true"):
        plan_cells(request(), wanted, tmp_path)
    with pytest.raises(ConfigError, match="pairs=65"):
        plan_cells(request(recall=True), [*SMALL, "recall.pairs=[65]"], tmp_path)
    # it may join a comparison later, be left out again, and not change
    for overrides, changes in (
        ([], {}),
        (["recall.updates=70"], {"recall": True}),
        ([], {}),
    ):
        cells = plan_cells(request(**changes), [*SMALL, *overrides], tmp_path)
        (tmp_path / SETTINGS_FILE).write_text(json.dumps(join_record(tmp_path, cells)))
    cells = plan_cells(request(recall=True), [*SMALL, "recall.updates=71"], tmp_path)
    with pytest.raises(ConfigError, match=r"recall\.updates=71: .* made with 70"):
        join_record(tmp_path, cells)


def test_options_unknown_at_that_time_are_no_change(tmp_path: Path) -> None:
    cells = plan_cells(request(), SMALL, tmp_path)
    record = join_record(tmp_path, cells)
    del record["attention"]["slay"]["epsilon"]
    del record["shared"]["model"]["short_convolution"]
    (tmp_path / SETTINGS_FILE).write_text(json.dumps(record))
    assert "short_convolution" in join_record(tmp_path, cells)["shared"]["model"]


def test_a_folder_of_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / SETTINGS_FILE).write_text("{}")
    with pytest.raises(UserError, match="not the settings of a comparison"):
        run(request(directory=str(tmp_path)), SMALL)
    assert [path.name for path in tmp_path.iterdir()] == [SETTINGS_FILE]
    assert (tmp_path / SETTINGS_FILE).read_text() == "{}"
    (tmp_path / SETTINGS_FILE).rename(tmp_path / "letter.txt")
    with pytest.raises(ConfigError, match=r"directory=.*holds letter.txt and no comparison"):
        run(request(directory=str(tmp_path)), SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path, text_folder: Path) -> None:
    (tmp_path / "file").write_text("mine")
    data = [f"data.source.path={text_folder}", f"data.cache_directory={tmp_path / 'cache'}"]
    with pytest.raises(UserError, match="settings"):
        run(request(directory=str(tmp_path / "file")), [*SMALL, *data])
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_of_another_process_is_waited_for(tmp_path: Path) -> None:
    (cell,) = plan_cells(request(attention=["softmax"], seeds=[1]), SMALL, tmp_path)
    cell.folder.mkdir()
    with cell.log.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        running = RunningCell(cell, Progress())
        assert not running.step(threads=1)
        (cell.folder / "summary.json").write_text('{"finished": true}')
        assert not running.step(threads=1)
    assert running.step(threads=1)
    assert running.process is None
    running.close()


def test_several_processes_plan_and_start_together(tmp_path: Path) -> None:
    batch = ["batch.samples_per_update=null", "batch.samples_per_device=4", "budget.tokens=64000"]
    alone, together = (
        plan_cells(request(seeds=[1], processes=count, recall=True), [*SMALL, *batch], tmp_path)
        for count in (1, 4)
    )
    # 64,000 tokens in updates of 4 or 16 samples of 16 tokens
    assert [cell.updates for cell in alone[:2]] == [1000, 1000]
    assert [cell.updates for cell in together[:2]] == [250, 250]
    first, second = together[0].command(), together[1].command()
    assert alone[0].command() == [sys.executable, str(ROOT / "train.py"), *alone[0].overrides]
    assert first[1:3] == ["-m", "deepspeed.launcher.runner"]
    assert first[first.index("--num_accelerators") + 1] == "4"
    # a run of another comparison at the same time has another port
    port = first.index("--master_port") + 1
    assert first[port] != second[port]
    assert first[-len(together[0].overrides) :] == together[0].overrides
    # recall is measured by one process
    assert together[2].command()[1] == str(ROOT / "scripts" / "recall.py")


class Comparison:
    """`mechanisms` on a small text, by the command line, in `directory`."""

    def __init__(self, directory: Path, text_folder: Path, mechanisms: Sequence[str]) -> None:
        self.directory = directory
        self.arguments = [
            *(f"attention=[{','.join(mechanisms)}]", "threads=1", f"directory={directory}"),
            *("tokenizer=bytes", "data=text", f"data.source.path={text_folder}"),
            f"data.cache_directory={directory.parent / 'cache'}",
            "data.validation_fraction=0.3",
            *("model.layers=1", "model.heads=2", "model.width=8", "model.context_length=16"),
            *("budget=updates", "budget.updates=40", "validation.tokens=7000"),
            *("validation.every_updates=20", "logging.sample_tokens=1"),
        ]

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the command; its output goes to a file beside the folder."""
        command = [sys.executable, str(ROOT / "scripts" / "compare.py"), *self.arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        # as under a launcher, whose variables are none of the runs' business
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        with self.directory.with_name("output.txt").open("ab") as output:
            return subprocess.Popen(
                [*command, *arguments],
                cwd=self.directory.parent,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def output(self) -> str:
        """Return everything printed so far."""
        return self.directory.with_name("output.txt").read_text()

    def wait_for(self, process: subprocess.Popen[bytes], cell: str, file: str) -> None:
        """Return as soon as `file` of a cell has content, while `process` runs."""
        path = self.directory / cell / file
        deadline = time.monotonic() + WAIT_SECONDS
        while not (path.exists() and path.stat().st_size):
            assert process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)

    def wait_for_stop(self, process: subprocess.Popen[bytes], cell: str) -> None:
        """Return as soon as the run of a cell has been told to stop."""
        deadline = time.monotonic() + WAIT_SECONDS
        while "stopping after" not in (self.directory / f"{cell}.log").read_text():
            assert process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)

    def starts(self, cell: str) -> int:
        """Return how often the cell has been trained, according to its log."""
        return (self.directory / f"{cell}.log").read_text().count("run directory: ")


def test_an_interruption_tells_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left, interruptible([], "directory=comparisons/now"):
        raise KeyboardInterrupt
    assert left.value.code == 130
    assert capsys.readouterr().err.endswith("the same command with directory=comparisons/now\n")


@pytest.mark.parametrize("width", [80, 120])
def test_the_display_shows_its_times_whole(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    progress = display(console)
    status = "update 3000/3000, loss 3.315 nats/token"
    progress.add_task("slay_block_quadratic seed 1", total=9, status=status)
    console.print(progress.get_renderable())
    line = console.file.getvalue().splitlines()[0]  # type: ignore[attr-defined]
    assert line.rstrip().endswith(f"{status} 0:00:00 left -:--:--")


@pytest.mark.slow
def test_kills_and_interruptions_lose_and_repeat_nothing(
    tmp_path: Path, text_folder: Path, make_gate: Any
) -> None:
    mechanisms = ["softmax", "linear_elu", "slay", "uniform"]
    comparison = Comparison(tmp_path / "comparison", text_folder, mechanisms)
    options = ("seeds=[1,2]", "logging.every_updates=100")
    ended = ("softmax-seed1", "softmax-seed2", "linear_elu-seed2")
    gates = {cell: make_gate(comparison.directory / cell) for cell in ended}
    summary = comparison.directory / "linear_elu-seed1" / "summary.json"

    # a run dies: the others go on. Then the comparison itself is killed in the middle of a run
    process = comparison.start(*options)
    comparison.wait_for(process, "softmax-seed1", "metrics.jsonl")
    (run_process,) = psutil.Process(process.pid).children()
    run_process.kill()
    gates["softmax-seed1"].open()
    comparison.wait_for(process, "softmax-seed2", "metrics.jsonl")
    before = (
        summary.stat().st_mtime_ns,
        (comparison.directory / "linear_elu-seed1.log").read_bytes(),
    )
    process.kill()
    process.wait()
    # the orphan keeps its folder to itself
    orphan_log = comparison.directory / "softmax-seed2.log"
    with orphan_log.open("ab") as log, pytest.raises(BlockingIOError):
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert "softmax seed 1: did not finish (exit code -9)" in comparison.output()
    assert not (comparison.directory / "softmax-seed2" / "summary.json").exists()

    # its run is not started again; later the comparison is asked to stop
    process = comparison.start(*options)
    gates["softmax-seed2"].open()
    comparison.wait_for(process, "linear_elu-seed2", "metrics.jsonl")
    process.terminate()
    comparison.wait_for_stop(process, "linear_elu-seed2")
    gates["linear_elu-seed2"].open()
    assert process.wait(timeout=WAIT_SECONDS) == 130
    told = f"to go on, the same command with directory={comparison.directory}\n"
    assert told in comparison.output()
    assert (comparison.directory / "linear_elu-seed2" / "checkpoints" / "latest").exists()
    assert not (comparison.directory / "linear_elu-seed2" / "summary.json").exists()

    process = comparison.start(*options)
    assert process.wait(timeout=WAIT_SECONDS) == 0, comparison.output()
    log_after = (comparison.directory / "linear_elu-seed1.log").read_bytes()
    assert (summary.stat().st_mtime_ns, log_after) == before
    # the one that died and the one that was stopped; no other was run twice
    names = [f"{mechanism}-seed{seed}" for mechanism in mechanisms for seed in (1, 2)]
    starts = {name: comparison.starts(name) for name in names}
    assert starts == dict.fromkeys(names, 1) | {"softmax-seed1": 2, "linear_elu-seed2": 2}
    assert "going on after update" in (comparison.directory / "linear_elu-seed2.log").read_text()

    with (comparison.directory / "comparison.csv").open(encoding="utf-8") as file:
        rows = {row["mechanism"]: row for row in csv.DictReader(file)}
    assert set(rows) == set(mechanisms)
    for mechanism, row in rows.items():
        folders = [comparison.directory / f"{mechanism}-seed{seed}" for seed in (1, 2)]
        summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
        losses = [one["validation_loss"] for one in summaries]
        assert row["seeds"] == "1 2"
        assert float(row["loss"]) == pytest.approx(sum(losses) / 2)
        assert float(row["loss_std"]) == pytest.approx(abs(losses[0] - losses[1]) / 2**0.5)
        for folder in folders:
            updates = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
            assert [u["update"] for u in updates if u["kind"] == "train"] == [*range(1, 41)]
        covers = "" if mechanism == "softmax" else "seeds and documents"
        assert (row["difference_covers"], row["baseline"]) == (covers, "softmax")
    assert (comparison.directory / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_run_that_cannot_start_leaves_the_others(tmp_path: Path, text_folder: Path) -> None:
    comparison = Comparison(tmp_path / "comparison", text_folder, ["softmax", "linear_elu"])
    comparison.directory.mkdir()
    (comparison.directory / "softmax-seed3").write_text("in the way")
    process = comparison.start("seeds=[3]", "budget.updates=20", "jobs=2")
    assert process.wait(timeout=WAIT_SECONDS) == 1, comparison.output()
    assert "softmax seed 3: did not finish (exit code 2)" in comparison.output()
    assert "there is a file of that name" in comparison.output()
    report = (comparison.directory / "comparison.md").read_text()
    assert "Did not finish: softmax seed 3." in report
    assert "| linear_elu | " in report
    assert "(1 seed)" in report
    assert (comparison.directory / "softmax-seed3").read_text() == "in the way"

    # what joins stands in one table with what was there
    (comparison.directory / "softmax-seed3").unlink()
    joining = ("attention=[softmax]", "baseline=linear_elu")
    process = comparison.start("seeds=[3]", "budget.updates=20", *joining)
    assert process.wait(timeout=WAIT_SECONDS) == 0, comparison.output()
    report = (comparison.directory / "comparison.md").read_text()
    assert "| linear_elu | " in report
    assert "| softmax | " in report
    assert "difference to linear_elu" in report
    assert "Did not finish" not in report


@pytest.mark.slow
def test_runs_of_several_processes_stop_and_go_on(
    tmp_path: Path, text_folder: Path, make_gate: Any
) -> None:
    comparison = Comparison(tmp_path / "comparison", text_folder, ["slay"])
    options = ("seeds=[1]", "processes=2")
    folder = comparison.directory / "slay-seed1"
    gate = make_gate(folder)

    process = comparison.start(*options)
    comparison.wait_for(process, "slay-seed1", "metrics.jsonl")
    started = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    comparison.wait_for_stop(process, "slay-seed1")
    gate.open()
    assert process.wait(timeout=WAIT_SECONDS) == 130, comparison.output()
    # both processes saved by themselves, and nothing is left of the launcher
    assert (folder / "checkpoints" / "latest").exists()
    assert not (folder / "summary.json").exists()
    assert not [one for one in started if one.is_running() and one.status() != "zombie"]
    log = (comparison.directory / "slay-seed1.log").read_text()
    assert "stopped and saved after update" in log

    process = comparison.start(*options)
    assert process.wait(timeout=WAIT_SECONDS) == 0, comparison.output()
    assert "going on after update" in (comparison.directory / "slay-seed1.log").read_text()
    assert json.loads((folder / "plan.json").read_text())["world_size"] == 2
    updates = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert [u["update"] for u in updates if u["kind"] == "train"] == [*range(1, 41)]
    losses = read_document_losses(folder)
    assert losses is not None
    summary = json.loads((folder / "summary.json").read_text())
    mean = losses.nats_D.sum() / losses.tokens_D.sum()
    assert mean == pytest.approx(summary["validation_loss"], rel=1e-12)
