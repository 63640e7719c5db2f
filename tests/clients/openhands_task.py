"""One task for the OpenHands SDK: its agent with a terminal and a file editor in this folder.

usage: openhands_task.py TASK
environment: LLM_MODEL, LLM_BASE_URL, LLM_API_KEY
"""

import os
import sys

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool
from pydantic import SecretStr


def main():
    llm = LLM(
        model=os.environ["LLM_MODEL"],
        base_url=os.environ["LLM_BASE_URL"],
        api_key=SecretStr(os.environ["LLM_API_KEY"]),
        usage_id="agent",
    )
    agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)])
    conversation = Conversation(agent=agent, workspace=os.getcwd(), visualizer=None)
    conversation.send_message(sys.argv[1])
    conversation.run()
    status = conversation.state.execution_status
    print("status", status)
    conversation.close()
    return 0 if status.value == "finished" else 1


if __name__ == "__main__":
    sys.exit(main())
