"""A small agent on Anthropic's Python SDK: it has one tool, bash, and runs until the model calls it no more.

usage: sdk_anthropic.py messages whole|stream
environment: ANTHROPIC_BASE_URL (without /v1), ANTHROPIC_API_KEY, MODEL

A stream that ends without message_stop must raise an exception, here or in the SDK: the turn is then asked for again,
once. A stream that breaks and ends as if it were whole ends this program with an error.
"""

import json
import os
import subprocess
import sys

import anthropic

PROMPT = "Make the files made_by_turn1.txt and made_by_turn2.txt, one after the other, with the shell."
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS = [{"name": "bash", "description": "Runs a command.", "input_schema": SCHEMA}]
# What lego asks the upstream for must not reach who did not ask for it; null is what engines write then.
FOREIGN = ("prompt_token_ids", "token_ids", "weight_versions")


class CleanEndOfABrokenStream(Exception):
    """The stream ended as if it were whole, but its end is missing."""


def clean(reply):
    text = reply.model_dump_json()
    for name in FOREIGN:
        assert f'"{name}":[' not in text, f"{name} in {text}"


def run(command):
    done = subprocess.run(["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.stdout + done.stderr


def asked(messages):
    """A request."""
    # A system prompt in two blocks and a cache mark, as agents send them.
    system = [
        {"type": "text", "text": "You make files. "},
        {"type": "text", "text": "One at a time.", "cache_control": {"type": "ephemeral"}},
    ]
    thinking = {"type": "enabled", "budget_tokens": 2048}
    model = os.environ["MODEL"]
    return {"model": model, "system": system, "tools": TOOLS, "thinking": thinking, "messages": messages}


def ask(client, stream, messages):
    """Asks for a turn."""
    request = {"max_tokens": 4096, **asked(messages)}
    if not stream:
        reply = client.messages.create(**request)
        clean(reply)
        return reply
    kinds = []
    with client.messages.stream(**request) as events:
        for event in events:
            clean(event)
            kinds.append(event.type)
        if "message_stop" not in kinds:
            raise CleanEndOfABrokenStream(f"no message_stop after {kinds[-3:]}")
        return events.get_final_message()


def main():
    how = sys.argv[2]
    client = anthropic.Anthropic()
    messages = [{"role": "user", "content": PROMPT}]
    retried = False
    for _ in range(8):
        try:
            reply = ask(client, how == "stream", messages)
        except CleanEndOfABrokenStream as error:
            print(f"a broken stream ended cleanly: {error}")
            return 3
        except Exception as error:
            print(f"{type(error).__module__}.{type(error).__name__}: {error}")
            if retried:
                raise
            retried = True
            continue
        blocks = [block.model_dump(exclude_none=True) for block in reply.content]
        print(json.dumps(blocks, ensure_ascii=False), reply.stop_reason)
        counted = client.messages.count_tokens(**asked(messages)).input_tokens
        assert reply.usage.input_tokens == counted > 0 and reply.usage.output_tokens > 0, (reply.usage, counted)
        # The SDK's own helper fields are not the protocol's.
        blocks = [{key: block[key] for key in block if key != "parsed_output"} for block in blocks]
        messages.append({"role": "assistant", "content": blocks})
        calls = [block for block in blocks if block["type"] == "tool_use"]
        assert (reply.stop_reason == "tool_use") == bool(calls), reply.stop_reason
        if not calls:
            return 0
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": run(call["input"]["command"])}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})
    print("the model never came to an end")
    return 4


if __name__ == "__main__":
    sys.exit(main())
