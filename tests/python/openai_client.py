"""Calls a chat endpoint with OpenAI's client: plain, streamed, and streamed with usage asked for.

Usage: openai_client.py BASE_URL [MODEL]
Prints one line a call: its name and what it got (text, or the tool's name and arguments).
"""

import json
import os
import sys

for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
    os.environ.pop(name, None)

import openai

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "view",
            "description": "Shows a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]


def show(text, tools):
    if tools:
        name, arguments = tools[0]
        json.loads(arguments)
        return f"{name} {arguments}"
    return text


def main():
    model = sys.argv[2] if len(sys.argv) > 2 else "toy"
    client = openai.OpenAI(base_url=sys.argv[1], api_key="placeholder", max_retries=0)
    asked = {"model": model, "messages": [{"role": "user", "content": "Say hello."}], "tools": TOOLS}

    reply = client.chat.completions.create(**asked)
    message = reply.choices[0].message
    tools = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    assert reply.usage.completion_tokens > 0
    assert reply.choices[0].logprobs is None, "log-probs that nobody asked for"
    print("plain", show(message.content, tools))

    for options in ({}, {"stream_options": {"include_usage": True}}):
        text, tools, reasons, usage = "", [], [], None
        for chunk in client.chat.completions.create(stream=True, **options, **asked):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                assert choice.logprobs is None, "log-probs that nobody asked for"
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or []:
                    if call.id:
                        tools.append([call.function.name, ""])
                    tools[-1][1] += call.function.arguments or ""
                if choice.finish_reason:
                    reasons.append(choice.finish_reason)
        assert len(reasons) == 1, reasons
        assert (usage is not None) == bool(options), "usage"
        print("stream", show(text, tools))


if __name__ == "__main__":
    main()
