"""A small agent on OpenAI's Python SDK: it has one tool, bash, and runs until the model calls it no more.

usage: sdk_openai.py chat|responses whole|stream
       sdk_openai.py chat|responses fixtures NAME:HOW...    what the SDK reads of replies
environment: OPENAI_BASE_URL, OPENAI_API_KEY, MODEL
"""

import json
import os
import sys

import openai
from sdk import PARAMETERS, PROMPT, CleanEndOfABrokenStream, clean, converse, read_fixtures

ABOUT = {"name": "bash", "description": "Runs a command.", "parameters": PARAMETERS}


def usage_of(usage, names):
    return [getattr(usage, name) for name in names] if usage else None


class Chat:
    """The chat completions protocol."""

    def __init__(self, client):
        self.client = client
        self.messages = [{"role": "user", "content": PROMPT}]
        self.tools = [{"type": "function", "function": ABOUT}]

    def read(self, stream, headers=None):
        """Asks for a turn. Returns what it says."""
        asked = {"model": os.environ["MODEL"], "messages": self.messages, "tools": self.tools, "extra_headers": headers}
        # Who reads fixtures wants the usage, too.
        if stream and headers:
            asked["stream_options"] = {"include_usage": True}
        said = self.streamed(asked) if stream else self.whole(asked)
        said["usage"] = usage_of(said["usage"], ("prompt_tokens", "completion_tokens"))
        return said

    def whole(self, asked):
        reply = self.client.chat.completions.create(**asked)
        clean(reply)
        choice = reply.choices[0]
        assert choice.logprobs is None
        message = choice.message
        calls = [[call.id, call.function.name, call.function.arguments] for call in message.tool_calls or []]
        reasoning = (message.model_extra or {}).get("reasoning")
        return {
            "text": message.content or "",
            "reasoning": reasoning or "",
            "calls": calls,
            "finish": choice.finish_reason,
            "usage": reply.usage,
        }

    def streamed(self, asked):
        said = {"text": "", "reasoning": "", "finish": None, "usage": None}
        calls = {}
        for chunk in self.client.chat.completions.create(stream=True, **asked):
            clean(chunk)
            said["usage"] = chunk.usage or said["usage"]
            for choice in chunk.choices:
                assert choice.logprobs is None
                delta = choice.delta
                said["finish"] = choice.finish_reason or said["finish"]
                said["text"] += delta.content or ""
                said["reasoning"] += (delta.model_extra or {}).get("reasoning") or ""
                for part in delta.tool_calls or []:
                    call = calls.setdefault(part.index, ["", "", ""])
                    if part.id:
                        call[:2] = part.id, part.function.name
                    call[2] += part.function.arguments or ""
        if said["finish"] is None:
            raise CleanEndOfABrokenStream(f"no finish_reason after {said} {calls}")
        return {**said, "calls": list(calls.values())}

    def keep(self, said):
        """Puts a turn into the history. Returns its tool calls."""
        message = {"role": "assistant", "content": said["text"]}
        if said["reasoning"]:
            message["reasoning"] = said["reasoning"]
        if said["calls"]:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for call_id, name, arguments in said["calls"]
            ]
        self.messages.append(message)
        return [(call_id, arguments) for call_id, _, arguments in said["calls"]]

    def result(self, call_id, output):
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})


class Responses:
    """The Responses protocol, nothing stored at the server."""

    def __init__(self, client):
        self.client = client
        self.input = [{"role": "user", "content": PROMPT}]
        self.tools = [{"type": "function", "strict": False, **ABOUT}]

    def read(self, stream, headers=None):
        """Asks for a turn. Returns what it says."""
        model = os.environ["MODEL"]
        asked = {"model": model, "input": self.input, "tools": self.tools, "store": False, "extra_headers": headers}
        if stream:
            reply = None
            for event in self.client.responses.create(stream=True, **asked):
                clean(event)
                if event.type == "response.completed":
                    reply = event.response
                elif event.type in ("response.failed", "error"):
                    raise RuntimeError(f"the stream says: {event.to_json()}")
            if reply is None:
                raise CleanEndOfABrokenStream("no response.completed")
        else:
            reply = self.client.responses.create(**asked)
            clean(reply)
        assert reply.status == "completed", reply.status
        thoughts = [part.text for item in reply.output if item.type == "reasoning" for part in item.content or []]
        calls = [item for item in reply.output if item.type == "function_call"]
        return {
            "text": reply.output_text,
            "reasoning": "".join(thoughts),
            "calls": [[call.call_id, call.name, call.arguments] for call in calls],
            "finish": reply.status,
            "usage": usage_of(reply.usage, ("input_tokens", "output_tokens")),
            "output": [item.model_dump(exclude_none=True) for item in reply.output],
        }

    def keep(self, said):
        """Puts a turn into the history. Returns its tool calls."""
        self.input += said["output"]
        return [(call_id, arguments) for call_id, _, arguments in said["calls"]]

    def result(self, call_id, output):
        self.input.append({"type": "function_call_output", "call_id": call_id, "output": output})


def main():
    wire, how, *fixtures = sys.argv[1:]
    agent = {"chat": Chat, "responses": Responses}[wire](openai.OpenAI())
    if how == "fixtures":
        return read_fixtures(agent.read, fixtures)

    def turn():
        said = agent.read(how == "stream")
        print(f"text: {said['text']}")
        return [(call_id, json.loads(arguments)["command"]) for call_id, arguments in agent.keep(said)]

    return converse(turn, agent.result)


if __name__ == "__main__":
    sys.exit(main())
