#!/usr/bin/env python3
"""Writes expert trajectories for the supervised warm start of lego-tiny.

    python3 models/lego-tiny/recipe/make_sft.py --stage a --out sft_a.jsonl

One trajectory a line: {"messages": [...]}, the messages that `lego agent` would have sent and received. The
experts are imperfect on purpose: each turn makes the right edit with probability p, else a random mutation of
the broken function, and gives up after a failure with probability g. The same bytes on every run and machine.
"""

import argparse
import json
import os
import sys
from random import Random

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "..", "data"))

from mini import run  # noqa: E402
from mini.instances import RUNNER, base_files  # noqa: E402
from mini.mutations import mutations  # noqa: E402
from mini.tasks import WARM_START_TASKS, warm_start_tasks  # noqa: E402

MAX_TURNS = 3
MAX_EDITED_LINE = 160
# stage: trajectories, p, g, seed. Stages a and b are one epoch each of `lego sft` with 8 trajectories a step.
STAGES = {
    "tokenizer": (1500, 0.5, 0.2, 1000),
    "a": (5200 * 8, 0.8, 0.3, 1000),
    "b": (1737 * 8, 0.4, 0.5, 1001),
}


class Workspace:
    """The task's function under the agent's tools."""

    def __init__(self, task):
        self.task = task
        self.lines = list(task.broken)
        self.passed = False

    def edit(self, index, text):
        """What the tool `edit` answers."""
        line = self.lines[index]
        changed = list(self.lines)
        changed[index] = line[: len(line) - len(line.lstrip())] + text.strip()
        if len(changed[index]) >= MAX_EDITED_LINE:
            return "ERROR bad call"
        if changed == self.lines:
            return "FAIL no change"
        answer = self.first_failure(changed)
        if answer is None:
            self.lines, self.passed, answer = changed, True, "PASS"
        return answer

    def first_failure(self, lines):
        task, name = self.task, self.task.function.name
        function = run.load(task.source(lines), name)
        for case in task.visible:
            failure = run.failure(name, function, task.arguments[case], task.want[case])
            if failure:
                return failure
        return None


def first_message(task):
    """The statement and the numbered lines of the function it names."""
    listing = [f"{number}|{line}" for number, line in enumerate(task.broken, task.first_line)]
    return "\n".join([task.statement] + listing)


def call(number, name, arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
    }


def trajectory(task, rng, p, g):
    """The messages of one attempt."""
    workspace = Workspace(task)
    messages = [{"role": "user", "content": first_message(task)}]
    for turn in range(1, MAX_TURNS + 1):
        if workspace.passed or (turn > 1 and rng.random() < g):
            messages.append(call(turn, "submit", {}))
            return messages
        if rng.random() < p:
            index, line = task.bug.index, task.function.lines[task.bug.index]
        else:
            wrong = rng.choice(mutations(task.broken))
            index, line = wrong.index, wrong.line
        messages.append(call(turn, "edit", {"line": task.first_line + index, "new": line.strip()}))
        answer = workspace.edit(index, line)
        if turn < MAX_TURNS:
            messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": answer})
    return messages


def write_workspace(folder, task):
    """The task's repository, as the agent finds it."""
    with open(RUNNER) as file:
        files = base_files(task, file.read())
    for path, text in files.items():
        path = os.path.join(folder, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", choices=sorted(STAGES), required=True)
    parser.add_argument("--out", required=True, help="JSONL file to write")
    parser.add_argument("--count", type=int, help="trajectories (default: what the stage needs)")
    parser.add_argument("--p", type=float, help="probability of the right edit (default: the stage's)")
    parser.add_argument("--g", type=float, help="probability of giving up after a failure (default: the stage's)")
    parser.add_argument("--tasks", type=int, default=WARM_START_TASKS, help="tasks to draw trajectories from")
    parser.add_argument("--workspaces", help="folder that gets each trajectory's repository, by its number")
    args = parser.parse_args()
    count, p, g, seed = STAGES[args.stage]
    count = count if args.count is None else args.count
    p = p if args.p is None else args.p
    g = g if args.g is None else args.g

    tasks = warm_start_tasks(args.tasks)
    rng = Random(seed)
    with open(args.out, "w") as out:
        for number in range(count):
            task = tasks[number % len(tasks)] if args.stage == "tokenizer" else rng.choice(tasks)
            if args.workspaces:
                write_workspace(os.path.join(args.workspaces, str(number)), task)
            out.write(json.dumps({"messages": trajectory(task, rng, p, g)}) + "\n")


if __name__ == "__main__":
    main()
