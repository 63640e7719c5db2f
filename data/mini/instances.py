"""Tasks as dataset lines in SWE-bench's schema, and their repositories."""

import difflib
import os
from typing import Dict, List

from .bundle import Bundle
from .tasks import Task

OWNER = "lego-mini"
RUNNER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "run.py")


def suite(task: Task, title: str, cases: Dict[str, int]) -> str:
    """A test file: the named cases of the task's function."""
    rows = [f'    "{name}": ({task.arguments[case]!r}, {task.want[case]!r}),' for name, case in cases.items()]
    lines = [
        f'"""{title} of {task.function.name}: name: (arguments, wanted result)."""',
        "",
        f'FILE = "{task.file}"',
        f'FUNCTION = "{task.function.name}"',
        "CASES = {",
        *rows,
        "}",
    ]
    return "\n".join(lines) + "\n"


def visible_tests(task: Task) -> str:
    return suite(task, "Tests", {f"test_{number}": case for number, case in enumerate(task.visible, 1)})


def hidden_tests(task: Task) -> str:
    return suite(task, "Hidden tests", {hidden_name(case): case for case in range(len(task.arguments))})


def hidden_name(case: int) -> str:
    return f"test_hidden_{case + 1:02}"


def base_files(task: Task, runner: str) -> Dict[str, str]:
    """The repository at the task's base commit."""
    stem = task.file[: -len(".py")]
    return {
        task.file: task.source(task.broken),
        "tests/run.py": runner,
        f"tests/test_{stem}.py": visible_tests(task),
    }


def change(path: str, before: str, after: str) -> str:
    """A patch in git's form."""
    header = f"diff --git a/{path} b/{path}\n"
    old = f"a/{path}"
    if not before:
        header += "new file mode 100644\n"
        old = "/dev/null"
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), old, f"b/{path}")
    return header + "".join(lines)


def instance(task: Task, id: str, repo: str, commit: str, bundle: str, split: str) -> dict:
    """One line of the dataset."""
    stem = task.file[: -len(".py")]
    good = task.source(task.function.lines)
    failing = set(task.failing)
    cases = range(len(task.arguments))
    return {
        "instance_id": id,
        "repo": repo,
        "base_commit": commit,
        "problem_statement": task.statement,
        "patch": change(task.file, task.source(task.broken), good),
        "test_patch": change(f"tests/test_{stem}_hidden.py", "", hidden_tests(task)),
        "FAIL_TO_PASS": [hidden_name(case) for case in cases if case in failing],
        "PASS_TO_PASS": [hidden_name(case) for case in cases if case not in failing],
        "split": split,
        "bug_family": task.bug.family,
        "entry_file": task.file,
        "bundle": bundle,
        "test_format": "cases/1",
    }


def build(tasks: Dict[str, List[Task]], bundle_folder: str):
    """Dataset lines of all tasks (split to tasks), and the bundles they need by file name."""
    with open(RUNNER) as file:
        runner = file.read()
    bundles, lines, counts = {}, [], {}
    for split, members in tasks.items():
        for task in members:
            stem = task.file[: -len(".py")]
            counts[stem] = counts.get(stem, 0) + 1
            id = f"{OWNER}__{stem}-{counts[stem]}"
            name = f"{stem}.bundle"
            bundle = bundles.setdefault(name, Bundle())
            commit = bundle.commit(f"refs/heads/{id}", base_files(task, runner), f"{task.file} with its tests")
            lines.append(instance(task, id, f"{OWNER}/{stem}", commit, f"{bundle_folder}/{name}", split))
    return lines, bundles
