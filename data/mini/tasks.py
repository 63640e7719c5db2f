"""Tasks: a file of three functions, one of them broken, with its tests."""

from dataclasses import dataclass, field
from random import Random
from typing import List, Optional, Set

from . import run
from .functions import NOUNS, Function, draw_function
from .mutations import Mutation, mutations
from .split import HELDOUT, TRAIN, belongs, definitions, skeletons

FUNCTIONS = 3
CASES = 14
WARM_START_SEED, WARM_START_TASKS = 7, 12_000
TRAIN_SEED, TRAIN_TASKS = 55, 400
HELDOUT_SEED, HELDOUT_TASKS = 8, 240


@dataclass
class Task:
    """`functions[target]` is broken by `bug`; `visible` are the cases that the agent may see."""

    file: str
    functions: List[Function]
    target: int
    bug: Mutation
    arguments: List[tuple]
    want: List[object]
    failing: List[int]
    visible: List[int]
    broken: List[str] = field(default_factory=list)

    @property
    def function(self) -> Function:
        return self.functions[self.target]

    @property
    def first_line(self) -> int:
        """Number in the file of the function's first line."""
        return 1 + sum(len(function.lines) + 1 for function in self.functions[: self.target])

    @property
    def statement(self) -> str:
        return f"{self.file}: {self.function.name} should {self.function.statement}"

    def source(self, lines: List[str]) -> str:
        """The file with these lines as the target function."""
        blocks = [function.lines for function in self.functions]
        blocks[self.target] = lines
        return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def with_bug(lines: List[str], bug: Mutation) -> List[str]:
    return lines[: bug.index] + [bug.line] + lines[bug.index + 1 :]


def results(lines: List[str], name: str, arguments: List[tuple]) -> List[str]:
    """What the function returns for each argument tuple, as text."""
    function = run.load("\n".join(lines), name)
    return [run.call(function, each) for each in arguments]


def draw_functions(rng: Random, split: str) -> List[Function]:
    """Functions of one split with distinct names."""
    drawn, taken = [], set()
    while len(drawn) < FUNCTIONS:
        function = draw_function(rng)
        names = {definition[0].split("(")[0] for definition in definitions(function.lines)}
        if belongs(function.lines, split) and not names & taken:
            drawn.append(function)
            taken |= names
    return drawn


def draw_task(rng: Random, split: str, foreign: Optional[Set[str]] = None) -> Task:
    """Draws a task whose broken function has no skeleton of the other split.

    For training that is a matter of the hash. Held-out bugs may have any skeleton but those in `foreign`,
    which training has.
    """
    while True:
        functions = draw_functions(rng, split)
        file = f"{rng.choice(NOUNS)}.py"
        target = rng.randrange(FUNCTIONS)
        function = functions[target]
        arguments = [function.draw_arguments(rng) for _ in range(CASES)]
        good = results(function.lines, function.name, arguments)
        if "ERR" in good or len(set(good)) < 3:
            continue
        bugs = mutations(function.lines)
        family = rng.choice(sorted({bug.family for bug in bugs}))
        bugs = [bug for bug in bugs if bug.family == family]
        rng.shuffle(bugs)
        for bug in bugs[:4]:
            broken = with_bug(function.lines, bug)
            if split == TRAIN and not belongs(broken, TRAIN):
                continue
            if split == HELDOUT and not foreign.isdisjoint(skeletons(broken)):
                continue
            got = results(broken, function.name, arguments)
            failing = [case for case in range(CASES) if got[case] != good[case]]
            if len(failing) < 2 or got == ["ERR"] * CASES:
                continue
            other = rng.choice([case for case in range(CASES) if case != failing[0]])
            correct = run.load("\n".join(function.lines), function.name)
            want = [correct(*each) for each in arguments]
            visible = [failing[0], other]
            return Task(file, functions, target, bug, arguments, want, failing, visible, broken)


def warm_start_tasks(count: int = WARM_START_TASKS) -> List[Task]:
    """The first tasks of the supervised warm start."""
    rng = Random(WARM_START_SEED)
    return [draw_task(rng, TRAIN) for _ in range(count)]


def train_tasks() -> List[Task]:
    """The training tasks of the dataset."""
    return distinct(Random(TRAIN_SEED), TRAIN, TRAIN_TASKS)


def heldout_tasks(training: List[Task]) -> List[Task]:
    """The held-out tasks of the dataset; `training` is all that a policy may have seen."""
    seen = set()
    for task in training:
        for function in task.functions:
            seen.update(skeletons(function.lines))
        seen.update(skeletons(task.broken))
    return distinct(Random(HELDOUT_SEED), HELDOUT, HELDOUT_TASKS, seen)


def distinct(rng: Random, split: str, count: int, foreign: Optional[Set[str]] = None) -> List[Task]:
    """Tasks that differ in statement or in source."""
    tasks = {}
    while len(tasks) < count:
        task = draw_task(rng, split, foreign)
        tasks.setdefault((task.statement, task.source(task.broken)), task)
    return list(tasks.values())
