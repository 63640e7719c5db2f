"""`lego proxy` in front of `lego serve`, used by OpenAI's client and read back by duckdb.

    serve_and_proxy.py LEGO MODEL FOLDER
"""

import socket
import subprocess
import sys
import time
import urllib.request

import duckdb
from openai import OpenAI

lego, model, folder = sys.argv[1:]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(*arguments):
    return subprocess.Popen([lego, *arguments], stderr=subprocess.PIPE, text=True)


def wait_for(url, process):
    for _ in range(600):
        assert process.poll() is None, process.stderr.read()
        try:
            urllib.request.urlopen(url)
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"{url} does not answer")


upstream, port = free_port(), free_port()
serve = start("serve", "--model-path", model, "--port", str(upstream))
proxy = None
try:
    wait_for(f"http://127.0.0.1:{upstream}/health", serve)
    # Run in the repository's folder, whose train.toml must not choose the upstream.
    proxy = start(
        "proxy", "--upstream", f"http://127.0.0.1:{upstream}/v1", "--port", str(port), "--capture-dir", folder
    )
    wait_for(f"http://127.0.0.1:{port}/readyz", proxy)
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="placeholder")
    name = client.models.list().data[0].id
    statement = "sizes.py: score_nums should return the sum of v over v in vals\n15|def score_nums(vals):\n16|    return 1"
    call = {"model": name, "messages": [{"role": "user", "content": statement}], "max_tokens": 40, "temperature": 1}
    tools = [{"type": "function", "function": {"name": "edit", "parameters": {"type": "object"}}}]

    plain = client.chat.completions.create(**call)
    assert plain.usage.completion_tokens > 0
    assert plain.choices[0].logprobs is None, "what lego asked for is cut out"
    client.chat.completions.create(**call, tools=tools)
    chunks = list(client.chat.completions.create(**call, tools=tools, stream=True))
    assert chunks[-1].choices[0].finish_reason, chunks[-1]
finally:
    for process in (proxy, serve):
        if process:
            process.terminate()
    shown = proxy.communicate(timeout=30)[1] if proxy else ""
    serve.communicate(timeout=30)
assert str(upstream) in shown, f"another upstream was used: {shown}"

rows = duckdb.sql(
    f"select kind, client_stream, len(prompt_token_ids), len(completion_token_ids), len(completion_logprobs), "
    f"usage.prompt_tokens, usage.completion_tokens from read_parquet('{folder}/date=*/*.parquet')"
).fetchall()
# lego's own probe of the upstream, and the three calls.
kinds = sorted((kind, is_stream) for kind, is_stream, *_ in rows)
assert kinds == [("probe", False), ("unknown", False), ("unknown", False), ("unknown", True)], rows
for _, _, prompt, ids, logprobs, usage_prompt, usage_completion in rows:
    assert prompt == usage_prompt and ids == logprobs == usage_completion > 0, rows
print("ok")
