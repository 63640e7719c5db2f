"""Proves that no function of a held-out task equals one of training or of the warm start as a syntax tree.

Compares every `def` of every file, broken and fixed, with identifiers (builtins and attributes too) numbered by
first appearance and constants replaced by their type. Reads the files out of the dataset and the bundles
themselves; the warm start's come from the generator.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile

DATA = sys.argv[1]
sys.path.insert(0, DATA)

from mini.tasks import warm_start_tasks  # noqa: E402


class Normalise(ast.NodeTransformer):
    def __init__(self):
        self.numbers = {}

    def number(self, name):
        return self.numbers.setdefault(name, f"v{len(self.numbers)}")

    def visit_FunctionDef(self, node):
        node.name = self.number(node.name)
        return self.generic_visit(node)

    def visit_arg(self, node):
        node.arg = self.number(node.arg)
        return node

    def visit_Name(self, node):
        node.id = self.number(node.id)
        return node

    def visit_Attribute(self, node):
        self.generic_visit(node)
        node.attr = self.number(node.attr)
        return node

    def visit_Constant(self, node):
        node.value = type(node.value).__name__
        return node


def functions(source):
    for node in ast.parse(source).body:
        yield ast.dump(Normalise().visit(node))


def git(*args, **options):
    return subprocess.run(["git", *args], check=True, capture_output=True, **options).stdout.decode()


def dataset():
    """(split, broken file, fixed file) of each task."""
    with open(os.path.join(DATA, "swebench_mini.jsonl")) as file:
        tasks = [json.loads(line) for line in file]
    with tempfile.TemporaryDirectory() as folder:
        git("init", "-q", "--bare", folder)
        for bundle in sorted({task["bundle"] for task in tasks}):
            git("--git-dir", folder, "fetch", "-q", os.path.join(DATA, bundle), "refs/heads/*:refs/heads/*")
        for task in tasks:
            broken = git("--git-dir", folder, "show", f"{task['base_commit']}:{task['entry_file']}")
            lines = broken.splitlines()
            # The reference patch is one hunk.
            hunk = task["patch"].split("@@\n", 1)[1].splitlines()
            start = int(task["patch"].split("@@ -")[1].split(",")[0]) - 1
            old = [line[1:] for line in hunk if line[0] != "+"]
            assert lines[start : start + len(old)] == old, task["instance_id"]
            new = [line[1:] for line in hunk if line[0] != "-"]
            fixed = lines[:start] + new + lines[start + len(old) :]
            yield task["split"], broken, "\n".join(fixed) + "\n"


train, heldout = set(), set()
for split, *files in dataset():
    for source in files:
        (train if split == "train" else heldout).update(functions(source))
for task in warm_start_tasks():
    train.update(functions(task.source(task.broken)))
    train.update(functions(task.source(task.function.lines)))
common = train & heldout
print(f"{len(train)} training and {len(heldout)} held-out functions, {len(common)} in common")
sys.exit(1 if common else 0)
