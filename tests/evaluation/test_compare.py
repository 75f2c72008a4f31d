"""What a comparison asks of its runs, what it refuses, and that its folder is its own."""

from __future__ import annotations

import fcntl
import json
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rich.progress import Progress

from slayformer.cli import COMMANDS, CONFIGURATIONS, compose
from slayformer.config import TrainConfig
from slayformer.config_commands import CompareConfig, RecallConfig
from slayformer.config_loading import load_config
from slayformer.errors import ConfigError, UserError
from slayformer.evaluation.cells import RunningCell
from slayformer.evaluation.compare import (
    SETTINGS_FILE,
    join_record,
    plan_cells,
    read_config,
    run,
    split_arguments,
)
from slayformer.paper.published import TABLE_5

ROOT = Path(__file__).resolve().parents[2]
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


def begin(directory: Path) -> None:
    """Let the first run of the comparison in `directory` have saved something."""
    checkpoints = directory / "slay-seed1" / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    (checkpoints / "latest").write_text("update_0000000")


def test_a_folder_belongs_to_one_comparison(tmp_path: Path) -> None:
    def claim(overrides: list[str], **changes: object) -> None:
        cells = plan_cells(request(**changes), [*SMALL, *overrides], tmp_path)
        (tmp_path / SETTINGS_FILE).write_text(json.dumps(join_record(tmp_path, cells)))

    # a mistake, which no run has come past, binds nobody
    claim(["engine.deepspeed={gradient_cliping: 1}", "model.width=24"])
    claim([])
    begin(tmp_path)
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
        begin(tmp_path)
    cells = plan_cells(request(recall=True), [*SMALL, "recall.updates=71"], tmp_path)
    with pytest.raises(ConfigError, match=r"recall\.updates=71: .* made with 70"):
        join_record(tmp_path, cells)


def test_logs_and_prepared_tokens_may_be_in_the_folder_before(tmp_path: Path) -> None:
    for name in (".hidden", "log", "log.txt", "compare.log", "settings.json.12.tmp"):
        (tmp_path / name).touch()
    (tmp_path / "tokens" / "cache").mkdir(parents=True)
    own = [*SMALL, f"data.cache_directory={tmp_path}/tokens/cache"]
    join_record(tmp_path, plan_cells(request(), own, tmp_path))
    with pytest.raises(ConfigError, match="holds tokens and no comparison"):
        join_record(tmp_path, plan_cells(request(), SMALL, tmp_path))


def test_options_unknown_at_that_time_are_no_change(tmp_path: Path) -> None:
    cells = plan_cells(request(), SMALL, tmp_path)
    record = join_record(tmp_path, cells)
    del record["attention"]["slay"]["epsilon"]
    del record["shared"]["model"]["short_convolution"]
    begin(tmp_path)
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
