"""Runs the code of docs/exports.md against an export.

Usage: export_snippets.py FORM DOCS PACKAGES PATH
PACKAGES: a folder with verl alone. The export has the groups v0-g0, in which an episode has two rows; v0-g1, which is
not complete; v0-g2, an episode of which has no row.
"""

import ast
import asyncio
import sys
import types
import typing
from pathlib import Path

form, docs, packages, path = sys.argv[1], *map(Path, sys.argv[2:5])
blocks = [block.split("```")[0] for block in docs.read_text().split("```python\n")[1:]]


def verl():
    from pydantic import BaseModel

    source = packages / "verl/experimental/agent_loop/agent_loop.py"
    names = "AgentLoopMetrics", "AgentLoopOutput"
    wanted = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", None) in names]
    module = types.ModuleType("verl.experimental.agent_loop.agent_loop")
    scope = {"BaseModel": BaseModel, "Any": typing.Any, "Optional": typing.Optional}
    exec(compile(ast.Module(wanted, []), str(source), "exec"), scope)
    module.AgentLoopOutput = scope["AgentLoopOutput"]
    module.AgentLoopBase = object
    module.register = lambda name: lambda loop: loop
    for name in ("verl", "verl.experimental", "verl.experimental.agent_loop"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules[module.__name__] = module
    [code] = [block for block in blocks if "AgentLoopBase" in block]
    own = {}
    exec(code, own)
    groups = own["load"](path)
    assert list(groups) == ["v0-g0"], "a group that is not complete gives no baseline"
    loop = own["LegoCaptures"]()
    loop.groups = groups
    given = [asyncio.run(loop.run({}, extra_info={"group_id": "v0-g0"}, session_id=session)) for session in range(2)]
    # verl takes the last row of each session for its reward: one episode, one vote.
    assert [len(rows) for rows in given] == [2, 1]
    assert [rows[-1].reward_score for rows in given] == [1.0, 0.0]
    info = [row.extra_fields["reward_extra_info"] for rows in given for row in rows]
    assert [one["episode_id"] for one in info] == ["v0-g0-0", "v0-g0-0", "v0-g0-1"]
    assert all({"advantage", "group_id", "episode_samples"} <= one.keys() for one in info)


def trl():
    [code] = [block for block in blocks if "rollout_func" in block]
    own = {}
    exec(code, own)
    groups = own["load"](path)
    assert list(groups) == ["v0-g0"] and len(groups["v0-g0"]) == 2, "an episode is one completion"
    output = own["rollout_func_of"](groups)(["v0-g0", "v0-g0"], None)
    assert {"prompt_ids", "completion_ids", "logprobs"} <= output.keys()
    assert sorted(output["reward"]) == [0.0, 1.0]


globals()[form]()
print(form)
