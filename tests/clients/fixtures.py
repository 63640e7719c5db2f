#!/usr/bin/env python3
"""The SDKs of OpenAI and Anthropic, Python and JavaScript, read the replies of tests/fixtures/wire through lego.

usage: fixtures.py [--lego FILE] [--clients FOLDER]

For each kind of upstream a `lego proxy` stands in front of a server that replays the fixtures of that kind, whole and
broken off in their middle. Every SDK reads those that its protocol can be made of; what it read is compared with what
the fixture says, read here event by event. A reply that broke off, or that says that the engine failed, must be an
exception of the SDK's. One line an SDK and kind; the exit code is 1 if something was read wrong.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from lego_process import Failed, Lego

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WIRE = ROOT / "tests/fixtures/wire"
FIXTURES = {
    "vllm": (
        "vllm_chat_stream.sse",
        "vllm_chat_tools_stream.sse",
        "vllm_chat_stream_abort.sse",
        "vllm_chat_stream_error.sse",
        "vllm_chat.json",
        "vllm_chat_routed.json",
    ),
    "sglang": ("sglang_chat_stream_sglext.sse", "sglang_chat.json"),
    "openai": ("openai_chat_stream_nologprobs.sse",),
    "anthropic": ("anthropic_stream.sse", "anthropic_stream_error.sse", "anthropic_tools_stream.sse"),
}
# These are no replies to a client's protocol on any upstream that lego asks: the engines' own endpoints, a Responses
# stream, event streams as such. tests/proxy/cuts.rs has them all.
ELSEWHERE = (
    "responses_stream.sse",
    "sglang_generate.json",
    "sglang_generate_stream.sse",
    "sglang_generate_stream_incremental.sse",
    "sse_corner_cases.sse",
    "sse_corner_cases.expected.json",
    "vllm_inference_generate.json",
)
SDKS = [
    ("sdk_openai.py", "chat"),
    ("sdk_openai.py", "responses"),
    ("sdk_openai.mjs", "chat"),
    ("sdk_openai.mjs", "responses"),
    ("sdk_anthropic.py", "messages"),
    ("sdk_anthropic.mjs", "messages"),
]


class Replay(BaseHTTPRequestHandler):
    """Answers with the fixture that the client's header names."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.endswith("/responses"):
            # A gateway is asked for a response first; none of the fixtures' upstreams has them.
            self.send_error(404)
            return
        name = self.headers["x-fixture"]
        data = (WIRE / name).read_bytes()
        is_half = self.headers["x-half"] == "True"
        self.send_response(200)
        kind = "text/event-stream" if name.endswith(".sse") else "application/json"
        self.send_header("Content-Type", kind)
        # Of more bytes than come, if it is to break off.
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if is_half else data)
        self.close_connection = is_half


def events_of(name):
    text = (WIRE / name).read_text()
    if name.endswith(".json"):
        return [json.loads(text)]
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def said_in_chat(name):
    """What a chat fixture says."""
    said = {"text": "", "reasoning": "", "finish": None, "usage": None}
    calls = {}
    for event in events_of(name):
        if "error" in event:
            return {"error": True}
        usage = event.get("usage")
        said["usage"] = [usage["prompt_tokens"], usage["completion_tokens"]] if usage else said["usage"]
        for choice in event["choices"]:
            part = choice.get("delta") or choice.get("message") or {}
            said["text"] += part.get("content") or ""
            said["reasoning"] += part.get("reasoning") or ""
            said["finish"] = choice["finish_reason"] or said["finish"]
            for call in part.get("tool_calls") or []:
                about = calls.setdefault(call["index"], [call.get("id"), call["function"].get("name"), ""])
                about[2] += call["function"]["arguments"]
    return {**said, "calls": list(calls.values())}


def said_in_messages(name):
    """What a Messages fixture says."""
    said = {"text": "", "reasoning": "", "calls": []}
    for event in events_of(name):
        if event["type"] == "error":
            return {"error": True}
        block, delta = event.get("content_block") or {}, event.get("delta") or {}
        if block.get("type") == "tool_use":
            said["calls"].append([block["id"], block["name"], ""])
        said["text"] += delta.get("text") or ""
        said["reasoning"] += delta.get("thinking") or ""
        if "partial_json" in delta:
            said["calls"][-1][2] += delta["partial_json"]
        if event["type"] == "message_delta":
            said["finish"] = delta["stop_reason"]
            said["usage"] = [event["usage"]["input_tokens"], event["usage"]["output_tokens"]]
    return said


def expected(kind, wire, name, how):
    """What an SDK must read of a fixture on this wire."""
    said = said_in_messages(name) if kind == "anthropic" else said_in_chat(name)
    is_error = how == "half" or "error" in said
    # Chat tells of an abort as it is; the other protocols have no such end.
    if is_error or said["finish"] == "abort" and wire != "chat":
        return {"error": True}
    if kind != "anthropic" and wire == "messages":
        said["finish"] = {"stop": "end_turn", "tool_calls": "tool_use"}[said["finish"]]
    elif wire == "responses":
        said["finish"] = "completed"
    return said


def compared(said):
    """What is compared of what an SDK read: tool arguments by value, since Messages SDKs give them as objects."""
    if "error" in said:
        return {"error": True}
    calls = [[call_id, name, json.loads(arguments)] for call_id, name, arguments in said["calls"]]
    return {**{key: said[key] for key in ("text", "reasoning", "finish", "usage")}, "calls": calls}


def read(kind, script, wire, url, clients):
    """Runs an SDK over all fixtures of a kind. Returns how many it read, and what it read wrong."""
    is_js = script.endswith(".mjs")
    folder = clients / ("sdk-js" if is_js else "sdk-py")
    program = "node" if is_js else str(folder / "bin/python")
    fixtures = []
    for name in FIXTURES[kind]:
        hows = ("stream", "half") if name.endswith(".sse") else ("whole",)
        fixtures += [f"{name}:{how}" for how in hows]
    environment = {
        **{key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ},
        "MODEL": "toy-moe-8x",
        "SDK_FOLDER": str(folder),
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
    }
    arguments = [program, str(HERE / script), wire, "fixtures", *fixtures]
    done = subprocess.run(
        arguments, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180
    )
    lines = {}
    for line in done.stdout.splitlines():
        said = json.loads(line)
        lines[said["fixture"]] = said
    problems = [f"exit code {done.returncode}: {done.stderr[-2000:]}"] if done.returncode else []
    for fixture in fixtures:
        name, how = fixture.split(":")
        wanted, said = compared(expected(kind, wire, name, how)), lines.get(fixture)
        if said is None:
            problems.append(f"{fixture}: nothing was read")
        elif said.get("error") == "CleanEndOfABrokenStream" or compared(said) != wanted:
            problems.append(f"{fixture}: it read {said}\n        not {wanted}")
    return len(fixtures), problems


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lego", default=str(ROOT / "target/debug/lego"), help="lego's binary")
    parser.add_argument("--clients", type=Path, default=ROOT / "target/clients", help="folder that install.sh filled")
    options = parser.parse_args()
    clients, binary = options.clients.resolve(), str(Path(options.lego).resolve())
    known = {*(name for names in FIXTURES.values() for name in names), *ELSEWHERE}
    failed = sorted({path.name for path in WIRE.iterdir()} ^ known)
    if failed:
        print(f"fixtures.py: it has other fixtures than {WIRE}: {failed}")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Replay)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="lego-fixtures-") as scratch, ThreadPoolExecutor(2) as pool:
        for kind in FIXTURES:
            folder = Path(scratch) / kind
            folder.mkdir()
            settings = {"upstream_kind": kind, "relay": "live", "probe_upstream": False, "max_retries": 0}
            lego = Lego(binary, folder, f"http://127.0.0.1:{server.server_port}", **settings)
            try:
                sdks = [sdk for sdk in SDKS if kind != "anthropic" or sdk[1] == "messages"]
                jobs = [pool.submit(read, kind, *sdk, lego.url, clients) for sdk in sdks]
                for (script, wire), job in zip(sdks, jobs, strict=True):
                    count, problems = job.result()
                    failed += problems
                    verdict = "FAILED" if problems else "ok"
                    print(f"{script:<18} {wire:<10} {kind:<10} {verdict:<7} {count} fixtures", flush=True)
                    for problem in problems:
                        print(f"    {problem}", flush=True)
            finally:
                lego.stop()
    server.shutdown()
    print(f"fixtures: {len(failed)} read wrong", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as error:
        sys.exit(f"fixtures.py: {error}")
