"""The paper's synthetic tasks (section 3.3), and some of ours that separate mechanisms."""

from __future__ import annotations

from slayformer.errors import ConfigError, nearest
from slayformer.paper.tasks import arithmetic, basic, memory, ours, reasoning, robustness
from slayformer.paper.tasks.base import Task

# in the order of the paper's Table 7, ours last
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        basic.Copy(),
        basic.Sort(),
        basic.Reverse(),
        memory.Retrieval(),
        memory.KeyValueRecall(),
        memory.FirstToken(),
        memory.SelectiveCopy(),
        basic.LongCopy(),
        memory.DistantMatch(),
        memory.Multihop(),
        reasoning.Stack(),
        reasoning.Induction(),
        reasoning.Pattern(),
        arithmetic.Counting(),
        arithmetic.Parity(),
        arithmetic.Addition(),
        arithmetic.Modular(),
        reasoning.Bigram(),
        arithmetic.Majority(),
        robustness.NoisyCopy(),
        robustness.Compression(),
        arithmetic.Histogram(),
        ours.AssociativeRecall(),
        ours.InContextBigrams(),
        ours.SolvableStack(),
        ours.SolvableMultihop(),
    )
}


def task_named(name: str) -> Task:
    """Return the task; raises ConfigError for a name that is none."""
    if name not in TASKS:
        raise ConfigError("tasks", name, nearest(name, TASKS))
    return TASKS[name]
