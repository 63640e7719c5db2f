#!/usr/bin/env bash
# Makes seeds of the fixtures: fuzz/seed.sh FOLDER writes FOLDER/<target>/.
set -euo pipefail
fixtures=$(cd "$(dirname "$0")/../tests/fixtures" && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)

seed() { # target file...
    local target=$1
    shift
    mkdir -p "$out/$target"
    for file in "$@"; do
        cp "$file" "$out/$target/$(sha1sum "$file" | cut -c1-16)"
    done
}

cd "$fixtures"
shopt -s globstar nullglob
seed sse wire/*.sse harness/**/*.sse
seed messages_reply wire/anthropic* harness/**/*.response.sse harness/anthropic-python/**/*.response.json
seed responses_reply wire/responses* wire/sse*
seed messages_request harness/{claude-code,anthropic-python,pi/anthropic_wire,opencode/anthropic_wire}/**/*.request.json
seed responses_request harness/{codex,pi/responses_wire,opencode/responses_wire}/**/*.request.json
for target in chat_reply to_messages to_responses; do
    seed $target wire/{vllm,sglang_chat,openai}*
done
seed sglang_generate wire/sglang_generate*

# A conversation, a line a message. Payloads of the journal are all in the corpus: tests/fuzz_corpus.rs makes them.
mkdir -p "$out/splices" "$out/journal_payload"
for file in harness/**/*.request.json; do
    head -c 1500 "$file" | fold -w 60 > "$out/splices/$(sha1sum "$file" | cut -c1-16)"
done

mkdir -p "$out/http_reply"
reply() { # name, then parts of a reply
    local name=$1
    shift
    printf '%b' "$@" > "$out/http_reply/$name"
}
reply length 'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nContent-Length: 5\r\n\r\n{"a":1}'
reply chunked 'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n' '5\r\nhello\r\n0a;x="y"\r\n0123456789\r\n0\r\nx: y\r\n\r\nrest'
reply interim 'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n' 'HTTP/1.1 204 No Content\r\n\r\n'
reply close 'HTTP/1.0 200 OK\r\nconnection: keep-alive\r\n\r\nuntil the end'

mkdir -p "$out/routed_experts" "$out/openai_request"
python3 - "$out" <<'PY'
import base64, glob, json, os, sys

out = sys.argv[1]
text = open("wire/vllm_chat_routed.json").read()
routed = base64.b64decode(json.loads(text)["choices"][0]["routed_experts"])
open(f"{out}/routed_experts/npy", "wb").write(routed)
open(f"{out}/routed_experts/int32", "wb").write(b"".join(n.to_bytes(4, "little") for n in range(64)))
open(f"{out}/routed_experts/base64", "wb").write(base64.b64encode(routed))
requests = {
    "chat": {"model": "m", "messages": [{"role": "system", "content": "a"}, {"role": "system", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "c"}]}], "stream": True, "n": 2, "seed": 1, "stop": ["x"],
        "stream_options": {"include_usage": True}, "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "auto", "response_format": {"type": "json_object"}, "logit_bias": {"1": 2}},
    "texts": {"model": "m", "prompt": ["a", "b"], "n": 2, "logprobs": 0, "echo": True},
    "ids": {"model": "m", "prompt": [[1, 2], [3]], "stream": True, "return_token_ids": True},
    "one": {"model": "m", "prompt": [1, 2], "logit_bias": None},
}
for name, request in requests.items():
    open(f"{out}/openai_request/{name}", "w").write(json.dumps(request))

# Replies: the table of texts, each for its own form.
for number, case in enumerate(json.load(open("text/replies.json"))):
    folder = f"{out}/reply_{case.get('tools', 'openai')}"
    os.makedirs(folder, exist_ok=True)
    open(f"{folder}/{number:03}", "w").write(case["text"])


def short(value):
    """What a conversation is made of, without its bulk: short texts, few tools."""
    if isinstance(value, str):
        return value[:24]
    if isinstance(value, list):
        return [short(item) for item in value[:12]]
    if isinstance(value, dict):
        return {key: short(item) for key, item in list(value.items())[:16]}
    return value


# The seeds of requests are the harnesses' own, cut short: a fuzzer gets nowhere in 80 kB of tool descriptions.
for path in glob.glob(f"{out}/*_request/*"):
    text = json.dumps(short(json.load(open(path))))
    if len(text) > 400:
        open(path, "w").write(text)
PY
