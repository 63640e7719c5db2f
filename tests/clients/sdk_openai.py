"""A small agent on OpenAI's Python SDK: it has one tool, bash, and runs until the model calls it no more.

usage: sdk_openai.py chat|responses whole|stream
environment: OPENAI_BASE_URL, OPENAI_API_KEY, MODEL

A stream that ends without the protocol's own end must raise an exception, here or in the SDK: the turn is then asked
for again, once. A stream that breaks and ends as if it were whole ends this program with an error.
"""

import json
import os
import subprocess
import sys

import openai

PROMPT = "Make the files made_by_turn1.txt and made_by_turn2.txt, one after the other, with the shell."
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
ABOUT = {"name": "bash", "description": "Runs a command.", "parameters": PARAMETERS}
# What lego asks the upstream for must not reach who did not ask for it; null is what engines write then.
FOREIGN = ("prompt_token_ids", "token_ids", "weight_versions")


class CleanEndOfABrokenStream(Exception):
    """The stream ended as if it were whole, but its end is missing."""


def run(arguments):
    command = json.loads(arguments)["command"]
    done = subprocess.run(["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.stdout + done.stderr


def clean(reply):
    text = reply.model_dump_json()
    for name in FOREIGN:
        assert f'"{name}":[' not in text, f"{name} in {text}"


class Chat:
    """The chat completions protocol."""

    def __init__(self, client, stream):
        self.client, self.stream = client, stream
        self.messages = [{"role": "user", "content": PROMPT}]
        self.tools = [{"type": "function", "function": ABOUT}]

    def turn(self):
        """Asks for a turn. Returns its text and tool calls: (id, arguments)."""
        asked = {"model": os.environ["MODEL"], "messages": self.messages, "tools": self.tools}
        message = self.streamed(asked) if self.stream else self.whole(asked)
        self.messages.append(message)
        calls = [(call["id"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        return message["content"], calls

    def whole(self, asked):
        reply = self.client.chat.completions.create(**asked)
        clean(reply)
        assert reply.choices[0].logprobs is None
        message = reply.choices[0].message.model_dump(exclude_none=True)
        return {key: message[key] for key in ("role", "content", "reasoning", "tool_calls") if key in message}

    def streamed(self, asked):
        message = {"role": "assistant", "content": ""}
        calls, reason = {}, None
        for chunk in self.client.chat.completions.create(stream=True, **asked):
            clean(chunk)
            for choice in chunk.choices:
                assert choice.logprobs is None
                delta = choice.delta
                reason = choice.finish_reason or reason
                message["content"] += delta.content or ""
                more = (delta.model_extra or {}).get("reasoning")
                if more:
                    message["reasoning"] = message.get("reasoning", "") + more
                for part in delta.tool_calls or []:
                    call = calls.setdefault(part.index, {"type": "function", "function": {"arguments": ""}})
                    if part.id:
                        call["id"], call["function"]["name"] = part.id, part.function.name
                    call["function"]["arguments"] += part.function.arguments or ""
        if reason is None:
            raise CleanEndOfABrokenStream(f"no finish_reason after {message} {calls}")
        if calls:
            message["tool_calls"] = list(calls.values())
        return message

    def result(self, call_id, output):
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})


class Responses:
    """The Responses protocol, nothing stored at the server."""

    def __init__(self, client, stream):
        self.client, self.stream = client, stream
        self.input = [{"role": "user", "content": PROMPT}]
        self.tools = [{"type": "function", "strict": False, **ABOUT}]

    def turn(self):
        """Asks for a turn. Returns its text and tool calls: (id, arguments)."""
        asked = {"model": os.environ["MODEL"], "input": self.input, "tools": self.tools, "store": False}
        if self.stream:
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
        self.input += [item.model_dump(exclude_none=True) for item in reply.output]
        calls = [(item.call_id, item.arguments) for item in reply.output if item.type == "function_call"]
        return reply.output_text, calls

    def result(self, call_id, output):
        self.input.append({"type": "function_call_output", "call_id": call_id, "output": output})


def main():
    wire, how = sys.argv[1:]
    agent = {"chat": Chat, "responses": Responses}[wire](openai.OpenAI(), how == "stream")
    retried = False
    for _ in range(8):
        try:
            text, calls = agent.turn()
        except CleanEndOfABrokenStream as error:
            print(f"a broken stream ended cleanly: {error}")
            return 3
        except Exception as error:
            print(f"{type(error).__module__}.{type(error).__name__}: {error}")
            if retried:
                raise
            retried = True
            continue
        print(f"text: {text}")
        if not calls:
            return 0
        for call_id, arguments in calls:
            print(f"bash: {arguments}")
            agent.result(call_id, run(arguments))
    print("the model never came to an end")
    return 4


if __name__ == "__main__":
    sys.exit(main())
