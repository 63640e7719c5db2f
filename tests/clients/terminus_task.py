"""One task for terminus-2, the agent of harbor, in this folder: harbor itself wants Docker, the agent only something
that runs commands.

usage: terminus_task.py TASK
environment: MODEL (as litellm names it), OPENAI_API_BASE, OPENAI_API_KEY, LOGS (a folder for its logs), WITH_IDS (1:
ask for token ids and log-probs, as a trainer that reads them from the replies would)
"""

import asyncio
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

from harbor.agents.terminus_2.terminus_2 import Terminus2
from harbor.environments.base import ExecResult
from harbor.models.agent.context import AgentContext


class ThisMachine:
    """What the agent needs of an environment."""

    session_id = "lego"
    default_user = None

    def __init__(self, logs):
        self.trial_paths = SimpleNamespace(agent_dir=logs)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            command,
            cwd=cwd or os.getcwd(),
            env={**os.environ, **(env or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec or 60)
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode)

    async def is_dir(self, path, *_, **__):
        return Path(path).is_dir()

    async def upload_file(self, source_path, target_path):
        shutil.copy(source_path, target_path)

    async def download_file(self, source_path, target_path):
        shutil.copy(source_path, target_path)


async def main():
    logs = Path(os.environ["LOGS"])
    logs.mkdir(parents=True, exist_ok=True)
    with_ids = os.environ.get("WITH_IDS") == "1"
    agent = Terminus2(
        logs_dir=logs,
        model_name=os.environ["MODEL"],
        api_base=os.environ["OPENAI_API_BASE"],
        record_terminal_session=False,
        enable_summarize=False,
        collect_rollout_details=with_ids,
        interleaved_thinking=with_ids,
    )
    environment, context = ThisMachine(logs), AgentContext()
    await agent.setup(environment)
    await agent.run(sys.argv[1], environment, context)
    print(context.metadata)
    if with_ids:
        for details in context.rollout_details:
            prompts, completions = details["prompt_token_ids"], details["completion_token_ids"]
            logprobs = details["logprobs"]
            assert len(prompts) == len(completions) == len(logprobs) > 0, details.keys()
            assert all(len(ids) == len(each) > 0 for ids, each in zip(completions, logprobs, strict=True))
        assert context.rollout_details


if __name__ == "__main__":
    asyncio.run(main())
