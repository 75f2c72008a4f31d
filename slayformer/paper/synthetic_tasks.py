"""Tables 3, 7 and 8: accuracy on the synthetic tasks, between chance and what can be known."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from slayformer.paper.item import FAILS, HOLDS, HOLDS_AT, Claim, Data, Item, Picture, Request, Table
from slayformer.paper.published import TABLE_7, TABLE_8, TABLE_8_MECHANISMS
from slayformer.paper.tasks import TASKS
from slayformer.paper.tasks.base import ceiling, chance
from slayformer.paper.tasks.cells import Cell, train_cells

MECHANISMS = (*TABLE_8_MECHANISMS, "slay_best")
# the paper's
FIRST_SEED = 42
# a ceiling that near to chance leaves nothing to learn
NOTHING_TO_LEARN = 0.02
# accuracies that near are called the same
NEAR = 0.05
OURS = tuple(name for name, task in TASKS.items() if not task.training.published_model)
BOUNDS = ("chance", "ceiling")


def compute(request: Request) -> Data:
    """Return accuracies by task and mechanism, a number a seed, with each task's bounds."""
    return measure(
        tuple(TASKS),
        MECHANISMS,
        [FIRST_SEED + number for number in range(request.seed_count(quick=1, full=3))],
        request.directory,
        processes=request.processes,
        progress=request.progress,
    )


def measure(
    tasks: Sequence[str],
    mechanisms: Sequence[str],
    seeds: Sequence[int],
    directory: Path,
    *,
    processes: int,
    updates: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Data:
    """Return what `compute` does; cells that `directory` keeps are not trained again."""
    cells = [
        Cell(task, mechanism, seed, updates)
        for seed in seeds
        for task in tasks
        for mechanism in mechanisms
    ]
    results = train_cells(cells, directory, processes=processes, progress=progress)
    accuracy: dict[str, dict[str, list[float]]] = {}
    for cell, result in zip(cells, results, strict=True):
        by_mechanism = accuracy.setdefault(cell.task, {})
        by_mechanism.setdefault(cell.mechanism, []).append(result["accuracy"])
    bounds = {
        name: {"chance": chance(TASKS[name]), "ceiling": ceiling(TASKS[name])} for name in tasks
    }
    return {
        "seeds": list(seeds),
        "mechanisms": list(mechanisms),
        "accuracy": accuracy,
        "bounds": bounds,
    }


def categories(data: Data) -> dict[str, list[str]]:
    """Return the measured tasks by the paper's category, those with none left out."""
    measured = {
        category: [name for name in names if name in data["accuracy"]]
        for category, (names, _) in TABLE_7.items()
    }
    return {category: names for category, names in measured.items() if names}


def tables(data: Data) -> Sequence[Table]:
    """Return Table 8, Table 3, Table 7 with what each task leaves to learn, and our own tasks."""
    own = [name for name in OURS if name in data["accuracy"]]
    found = [_table_8(data), _table_3(data), _table_7(data)] if categories(data) else []
    return [*found, _ours(data, own)] if own else found


def _table_8(data: Data) -> Table:
    rows = [_row(data, name) for names in categories(data).values() for name in names]
    return Table(
        "table_8",
        "Table 8: accuracy on the 22 tasks (published value in brackets)",
        ["task", *data["mechanisms"], *BOUNDS],
        rows,
        f"{_spread_note(data)} Chance: the best answer that knows only its position. Ceiling: the "
        "best answers that see the tokens up to their own position, by the rule of the task.",
    )


def _ours(data: Data, names: Sequence[str]) -> Table:
    trained = "; ".join(
        f"{name}: {TASKS[name].training.updates:,} × {TASKS[name].training.samples}"
        for name in names
    )
    remarks = " ".join(f"{name}: {TASKS[name].remark}." for name in names if TASKS[name].remark)
    return Table(
        "solvable_tasks",
        "Not in the paper: tasks whose context holds every answer",
        ["task", *data["mechanisms"], *BOUNDS],
        [_row(data, name) for name in names],
        f"{_spread_note(data)} GPT-2 of 2 layers with short convolutions. Updates × sequences: "
        f"{trained}. {remarks}".strip(),
    )


def _table_3(data: Data) -> Table:
    rows = []
    for category, names in categories(data).items():
        cells = [
            _with_published(
                f"{_mean_over_tasks(data, names, mechanism):.3f}",
                _published_mean(names, mechanism),
            )
            for mechanism in data["mechanisms"]
        ]
        bounds = [statistics.fmean(data["bounds"][name][b] for name in names) for b in BOUNDS]
        rows.append([category, *cells, *(f"{bound:.3f}" for bound in bounds)])
    return Table(
        "table_3",
        "Table 3: mean accuracy by category (mean of the published Table 8 in brackets)",
        ["category", *data["mechanisms"], *BOUNDS],
        rows,
        "Published means leave out bigram, for which the paper shows no numbers.",
    )


def _table_7(data: Data) -> Table:
    rows = []
    for category, names in categories(data).items():
        empty = [name for name in names if _room(data, name) < NOTHING_TO_LEARN]
        rows.append([category, ", ".join(names), TABLE_7[category][1], ", ".join(empty) or "–"])
    return Table(
        "table_7",
        "Table 7: the categories, and tasks that leave nothing to learn",
        ["category", "tasks", "tests", "nothing to learn"],
        rows,
        f"Nothing to learn: the ceiling is less than {NOTHING_TO_LEARN} above what a constant "
        "answer to each position scores.",
    )


def _row(data: Data, name: str) -> list[str]:
    cells = []
    for mechanism in data["mechanisms"]:
        values = data["accuracy"][name][mechanism]
        text = f"{statistics.fmean(values):.3f}"
        if len(values) > 1:
            text += f" ± {statistics.stdev(values):.3f}"
        cells.append(_with_published(text, _published(name, mechanism)))
    return [name, *cells, *(f"{data['bounds'][name][bound]:.3f}" for bound in BOUNDS)]


def _with_published(text: str, published: float | None) -> str:
    return text if published is None else f"{text} ({published:.2f})"


def _spread_note(data: Data) -> str:
    seeds = ", ".join(map(str, data["seeds"]))
    if len(data["seeds"]) == 1:
        return f"1 seed ({seeds})."
    return f"Mean ± sample standard deviation over seeds {seeds}."


def _published(name: str, mechanism: str) -> float | None:
    """Return the published accuracy, None if the paper has none."""
    row = TABLE_8.get(name)
    if not row or mechanism not in TABLE_8_MECHANISMS:
        return None
    return row[TABLE_8_MECHANISMS.index(mechanism)][0]


def _published_mean(names: Iterable[str], mechanism: str) -> float | None:
    values = [value for name in names if (value := _published(name, mechanism)) is not None]
    return statistics.fmean(values) if values else None


def _mean(data: Data, name: str, mechanism: str) -> float:
    return statistics.fmean(data["accuracy"][name][mechanism])


def _mean_over_tasks(data: Data, names: Iterable[str], mechanism: str) -> float:
    return statistics.fmean(_mean(data, name, mechanism) for name in names)


def _room(data: Data, name: str) -> float:
    return data["bounds"][name]["ceiling"] - data["bounds"][name]["chance"]


def draw(data: Data) -> Sequence[Picture]:
    """Return the heat map: how much of the way from chance to ceiling each mechanism went."""
    import numpy as np
    from matplotlib.figure import Figure

    groups = [*categories(data).values(), [name for name in OURS if name in data["accuracy"]]]
    names = [name for group in groups for name in group]
    mechanisms = list(data["mechanisms"])
    shares = np.full((len(names), len(mechanisms)), np.nan)
    for row, name in enumerate(names):
        if _room(data, name) >= NOTHING_TO_LEARN:
            over = [_mean(data, name, m) - data["bounds"][name]["chance"] for m in mechanisms]
            shares[row] = np.clip(np.array(over) / _room(data, name), 0, 1)
    figure = Figure(
        figsize=(2.5 + len(mechanisms), 2.5 + 0.27 * len(names)), layout="constrained", dpi=150
    )
    axes = figure.subplots()
    axes.set_facecolor("#dddddd")
    image = axes.imshow(shares, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for row, name in enumerate(names):
        for column, mechanism in enumerate(mechanisms):
            bright = not shares[row, column] < 0.6
            axes.text(
                column,
                row,
                f"{_mean(data, name, mechanism):.2f}",
                ha="center",
                va="center",
                fontsize=8,
                color="black" if bright else "white",
            )
    axes.set_xticks(range(len(mechanisms)), mechanisms)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(names)), names)
    for end in np.cumsum([len(group) for group in groups])[:-1]:
        axes.axhline(end - 0.5, color="white", linewidth=2)
    label = "share of the way from chance to the ceiling (grey: nothing to learn)"
    figure.colorbar(image, label=label, location="bottom", shrink=0.7, aspect=40)
    caption = (
        "Accuracy on each task, the mean over seeds; the colour tells how far from chance to the "
        "causal ceiling it went. Below the last line: tasks of ours."
    )
    return [Picture("synthetic_tasks", caption, figure)]


def claims(data: Data) -> Sequence[Claim]:
    """Return the paper's sentence on the tasks (section 3.3), category by category."""
    averages = {
        mechanism: {
            category: _mean_over_tasks(data, names, mechanism)
            for category, (names, _) in TABLE_7.items()
        }
        for mechanism in data["mechanisms"]
    }
    slay, rivals = averages["slay"], ("performer", "linear_elu")
    won = [
        category
        for category in TABLE_7
        if slay[category] >= max(averages[rival][category] for rival in rivals) - 0.01
    ]
    if len(won) == len(TABLE_7):
        verdict = HOLDS
    else:
        verdict = f"{HOLDS_AT} {', '.join(won)}" if won else FAILS
    told = ", ".join(
        f"{mechanism} {statistics.fmean(averages[mechanism].values()):.3f}"
        for mechanism in ("slay", *rivals, "softmax")
    )
    return [
        Claim(
            "SLAY is as accurate as Performer and linear attention or more so, in every category "
            "of the synthetic tasks (to within .01).",
            "section 3.3, Table 3",
            f"mean over categories: {told}",
            verdict,
        ),
        *_table_8_claim(data),
        *_learnable_claim(data),
    ]


def _table_8_claim(data: Data) -> list[Claim]:
    """Return whether the accuracies of Table 8 came out again."""
    apart = {
        (name, mechanism): _mean(data, name, mechanism) - published
        for name in data["accuracy"]
        for mechanism in data["mechanisms"]
        if (published := _published(name, mechanism)) is not None
    }
    if not apart:
        return []
    near = sum(abs(gap) <= NEAR for gap in apart.values())
    farthest = sorted(apart, key=lambda cell: -abs(apart[cell]))[:3]
    told = ", ".join(
        f"{name} {mechanism} {apart[name, mechanism]:+.2f}" for name, mechanism in farthest
    )
    verdict = f"{HOLDS_AT} {near} of {len(apart)}" if near < len(apart) else HOLDS
    text = f"The accuracies of Table 8 (to within {NEAR:g})"
    measured = f"{near} of {len(apart)} are; farthest off: {told}"
    return [Claim(text, "Table 8", measured, verdict if near else FAILS)]


def _learnable_claim(data: Data) -> list[Claim]:
    """Return whether the published tasks can tell mechanisms apart at all."""
    names = [name for names in categories(data).values() for name in names]
    spread = {
        name: max(means) - min(means)
        for name in names
        if (means := [_mean(data, name, m) for m in data["mechanisms"] if m in TABLE_8_MECHANISMS])
    }
    if not spread:
        return []
    empty = [name for name in names if _room(data, name) < NOTHING_TO_LEARN]
    telling = [name for name in spread if spread[name] > NEAR]
    told = (
        f"nothing to learn in {len(empty)} ({', '.join(empty) or 'none'}); mechanisms differ by "
        f"more than {NEAR:g} in {len(telling)} ({', '.join(telling) or 'none'})"
    )
    verdict = f"{HOLDS_AT} {len(telling)} of {len(names)} tasks" if telling else FAILS
    text = "The tasks separate mechanisms"
    return [
        Claim(text, "Section 3.3 (implied)", told, HOLDS if len(telling) == len(names) else verdict)
    ]


ITEM = Item(
    name="tasks",
    title="The 22 synthetic tasks, and four of ours",
    sources=("Table 3", "Table 7", "Table 8"),
    minutes=25.0,
    compute=compute,
    published="Accuracies of five mechanisms; chance and what a causal model can know are not "
    "shown. Many tasks turn out to have no room between the two.",
    draw=draw,
    tables=tables,
    claims=claims,
)
