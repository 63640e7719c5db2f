"""A small agent on Anthropic's Python SDK: it has one tool, bash, and runs until the model calls it no more.

usage: sdk_anthropic.py messages whole|stream
       sdk_anthropic.py messages fixtures NAME:HOW...    what the SDK reads of replies
environment: ANTHROPIC_BASE_URL (without /v1), ANTHROPIC_API_KEY, MODEL
"""

import json
import os
import sys

import anthropic
from sdk import PARAMETERS, PROMPT, CleanEndOfABrokenStream, clean, converse, read_fixtures

TOOLS = [{"name": "bash", "description": "Runs a command.", "input_schema": PARAMETERS}]


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


def ask(client, stream, messages, headers=None):
    """Asks for a turn."""
    request = {"max_tokens": 4096, "extra_headers": headers, **asked(messages)}
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


def said_by(reply):
    """What a reply says, for comparison."""
    blocks = reply.content
    return {
        "text": "".join(block.text for block in blocks if block.type == "text"),
        "reasoning": "".join(block.thinking for block in blocks if block.type == "thinking"),
        "calls": [[block.id, block.name, json.dumps(block.input)] for block in blocks if block.type == "tool_use"],
        "finish": reply.stop_reason,
        "usage": [reply.usage.input_tokens, reply.usage.output_tokens],
    }


def main():
    _, how, *fixtures = sys.argv[1:]
    client = anthropic.Anthropic()
    messages = [{"role": "user", "content": PROMPT}]
    if how == "fixtures":
        return read_fixtures(lambda stream, headers: said_by(ask(client, stream, messages, headers)), fixtures)
    results = []

    def turn():
        if results:
            messages.append({"role": "user", "content": list(results)})
            results.clear()
        reply = ask(client, how == "stream", messages)
        blocks = [block.model_dump(exclude_none=True) for block in reply.content]
        print(json.dumps(blocks, ensure_ascii=False), reply.stop_reason)
        counted = client.messages.count_tokens(**asked(messages)).input_tokens
        assert reply.usage.input_tokens == counted > 0 and reply.usage.output_tokens > 0, (reply.usage, counted)
        # The SDK's own helper fields are not the protocol's.
        blocks = [{key: block[key] for key in block if key != "parsed_output"} for block in blocks]
        messages.append({"role": "assistant", "content": blocks})
        calls = [block for block in blocks if block["type"] == "tool_use"]
        assert (reply.stop_reason == "tool_use") == bool(calls), reply.stop_reason
        return [(call["id"], call["input"]["command"]) for call in calls]

    def result(call_id, output):
        results.append({"type": "tool_result", "tool_use_id": call_id, "content": output})

    return converse(turn, result)


if __name__ == "__main__":
    sys.exit(main())
