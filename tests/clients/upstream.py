#!/usr/bin/env python3
"""A scripted upstream in vLLM's shapes: POST /v1/chat/completions, GET /v1/models, POST /tokenize. Standard library
only.

usage: upstream.py [--port N] [--log FILE] [--fault FAULT]

It prints its base URL. The conversation it plays: turn 1 is reasoning, text and one call of the client's shell tool
that makes made_by_turn1.txt; turn 2 the same for made_by_turn2.txt; turn 3 is a final text. Clients without a shell
tool that speak terminus-2's JSON in text get the same in that form. Any other call without tools (a title, a summary)
gets a short text. The fault strikes the first call of the conversation, once.

Every command leaves a trace: it appends `begin` to traceN.txt, makes its file, appends `end`. A client that executes
half a command, or one command twice, is found out by it.

Token ids: a toy tokenizer of whole characters, up to three bytes a token, whose ids can be decoded. A prompt is
rendered from messages and tools as chat templates of the Qwen family do it, piece by piece, so that a conversation
that only grows has ids that only grow: the ids of turn 1's prompt and completion are a prefix of turn 2's prompt.

The log has one JSON line a request: number, path, headers, body, fault, what was answered, and the token ids.
"""

import argparse
import json
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "lego-test"
CREATED = 1_796_000_000
# drop: a reset of the connection; close: its end without the body's end.
FAULTS = ("none", "500_once", "429_once", "drop_mid_stream", "close_mid_stream")
CUTS = ("drop_mid_stream", "close_mid_stream")
RETRY_AFTER_SECS = 2
TOKENS_PER_CHUNK = 4
# A reply is cut where this has been sent: half of the command is out, and could already be run.
HALF = "echo 'made"
LAST_TEXT = "Both files are there: é, 北京, 🌍."

SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
SPECIAL_ID = {text: 1 + index for index, text in enumerate(SPECIAL)}
# Where the ids of pieces with one, two, three and four bytes begin.
BASES = {1: 100, 2: 1_000, 3: 100_000, 4: 20_000_000}


class BadRequest(Exception):
    """What vLLM answers with 400."""


# ---------------------------------------------------------------------------------------------------------------------
# The toy tokenizer


def pieces(text):
    """Cuts a text into pieces of whole characters, up to three bytes each, four for a single character."""
    piece = ""
    for character in text:
        if piece and len((piece + character).encode("utf-8", "replace")) > 3:
            yield piece
            piece = ""
        piece += character
    if piece:
        yield piece


def encode(text):
    """The ids of a text without special tokens."""
    ids = []
    for piece in pieces(text):
        data = piece.encode("utf-8", "replace")
        ids.append(BASES[len(data)] + int.from_bytes(data, "big"))
    return ids


def decode(ids):
    """The text of ids."""
    text = b""
    for number in ids:
        if number < BASES[1]:
            text += SPECIAL[number - 1].encode() if 0 < number <= len(SPECIAL) else b"?"
            continue
        length = max(size for size, base in BASES.items() if base <= number)
        text += (number - BASES[length]).to_bytes(length, "big")
    return text.decode("utf-8", "replace")


def token_of(number, with_id=False):
    """One token as log-probs tell it, or with its id in place of its text."""
    text = f"token_id:{number}" if with_id else decode([number])
    return {
        "token": text,
        # Any number that differs from token to token and is exact in 32 bits.
        "logprob": -((number % 61) + 1) / 32,
        "bytes": list(text.encode()),
        "top_logprobs": [],
    }


# ---------------------------------------------------------------------------------------------------------------------
# Prompts


def text_of(content):
    """A message's content as text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest("content is neither text nor a list of parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("text", "image_url"):
            raise BadRequest(f"unknown content part {json.dumps(part)[:80]}")
        texts.append(part.get("text", "") if part["type"] == "text" else "<image>")
    return "".join(texts)


def call_segments(name, arguments):
    """A tool call as the model writes it: (text, is_special) segments."""
    shown = json.dumps(arguments, ensure_ascii=False)
    head = '{"name": ' + json.dumps(name) + ', "arguments": '
    return [("<tool_call>", True), (head, False), (shown, False), ("}", False), ("</tool_call>", True)]


def ids_of(segments):
    """The ids of segments, each tokenized alone."""
    ids = []
    for text, is_special in segments:
        ids += [SPECIAL_ID[text]] if is_special else encode(text)
    return ids


def render(messages, tools):
    """The prompt of a conversation, ready for the assistant's next turn."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message")
    segments = []
    if tools:
        shown = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        segments += [("<|im_start|>", True), ("system\n# Tools\n" + shown, False), ("<|im_end|>", True), ("\n", False)]
    for message in messages:
        role = message.get("role")
        if role not in ("system", "developer", "user", "assistant", "tool"):
            raise BadRequest(f"unknown role {role!r}")
        content = text_of(message.get("content"))
        segments += [("<|im_start|>", True), (role + "\n", False)]
        if role == "assistant":
            reasoning = message.get("reasoning") or message.get("reasoning_content")
            if reasoning:
                segments += [("<think>", True), (reasoning, False), ("</think>", True)]
        elif role == "tool" and not message.get("tool_call_id"):
            raise BadRequest("a tool message without tool_call_id")
        segments.append((content, False))
        for call in message.get("tool_calls") or []:
            function = call.get("function") or {}
            try:
                arguments = json.loads(function.get("arguments") or "{}")
            except ValueError as error:
                raise BadRequest(f"tool call arguments are not JSON: {error}") from None
            segments += call_segments(function.get("name"), arguments)
        segments += [("<|im_end|>", True), ("\n", False)]
    segments += [("<|im_start|>", True), ("assistant\n", False)]
    return ids_of(segments)


def check(body):
    """Refuses what vLLM refuses."""
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    tools = body.get("tools")
    if tools is not None and (not isinstance(tools, list) or not tools):
        raise BadRequest("tools must not be an empty array")
    for tool in tools or []:
        if tool.get("type") != "function" or not isinstance((tool.get("function") or {}).get("name"), str):
            raise BadRequest(f"a tool that is not a function: {json.dumps(tool)[:120]}")
    if body.get("tool_choice") not in (None, "none") and not tools:
        raise BadRequest("tool_choice needs tools")
    if body.get("stream_options") is not None and not body.get("stream"):
        raise BadRequest("stream_options needs stream")
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise BadRequest("top_logprobs needs logprobs")


# ---------------------------------------------------------------------------------------------------------------------
# The script

SHELLS = [
    "bash",
    "Bash",
    "exec_command",
    "shell_command",
    "shell",
    "local_shell",
    "run_shell_command",
    "terminal",
    "execute_bash",
    "execute_command",
    "run_command",
]


def command_of(turn):
    """The shell command of turn 1 or 2."""
    return (
        f"echo begin >> trace{turn}.txt; echo 'made by turn {turn}' > made_by_turn{turn}.txt; "
        f"echo end >> trace{turn}.txt"
    )


def shell_arguments(schema, command):
    """Arguments for a client's shell tool: the command where it belongs, a neutral value for what else is required."""
    schema = schema or {}
    required = schema.get("required") or []
    arguments = {}
    for name, about in (schema.get("properties") or {}).items():
        kinds = about.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if name in ("command", "cmd", "script"):
            arguments[name] = ["bash", "-lc", command] if "array" in kinds else command
        elif name in required:
            if about.get("enum"):
                arguments[name] = about["enum"][0]
            elif "boolean" in kinds:
                arguments[name] = False
            elif "integer" in kinds or "number" in kinds:
                arguments[name] = 10
            else:
                arguments[name] = "Makes a file"
    return arguments


class Turn:
    """What the model answers: reasoning, text, at most one tool call."""

    def __init__(self, text, reasoning=None, call=None, number=None):
        self.text, self.reasoning, self.call = text, reasoning, call
        # 1, 2, 3: a turn of the conversation; None: a side call.
        self.number = number

    @property
    def finish_reason(self):
        return "tool_calls" if self.call else "stop"

    def parts(self):
        """(kind, text, ids) in the order of sampling; kind: hidden, reasoning, content, name, arguments."""
        parts = []
        if self.reasoning:
            parts += [("hidden", "<think>"), ("reasoning", self.reasoning), ("hidden", "</think>")]
        parts.append(("content", self.text))
        if self.call:
            kinds = ["hidden", "name", "arguments", "hidden", "hidden"]
            parts += [(kind, text) for kind, (text, _) in zip(kinds, call_segments(*self.call), strict=True)]
        parts.append(("hidden", "<|im_end|>"))
        return [(kind, text, [SPECIAL_ID[text]] if text in SPECIAL_ID else encode(text)) for kind, text in parts]


def schema_answer(schema):
    """The smallest object that a JSON schema asks for."""
    answer = {}
    for name, about in (schema.get("properties") or {}).items():
        kind = about.get("type")
        answer[name] = {"boolean": False, "integer": 1, "number": 1, "array": [], "object": {}}.get(kind, "Two files")
    return json.dumps(answer)


def done_in(messages):
    """How many of the two commands the history has, whole: clients keep half a call that they did not run, too."""
    said = [message for message in messages if message.get("role") == "assistant"]
    said = json.dumps([[message.get("content"), message.get("tool_calls")] for message in said])
    return next((done for done in (2, 1) if f"echo end >> trace{done}.txt" in said), 0)


def terminus_turn(done):
    """terminus-2 has no tools: commands are JSON in the text."""
    commands = [] if done >= 2 else [{"keystrokes": command_of(done + 1) + "\n", "duration": 1.0}]
    answer = {
        "analysis": f"{done} of 2 files are there.",
        "plan": "Make the files one by one.",
        "commands": commands,
        "task_complete": done >= 2,
    }
    return Turn(json.dumps(answer, indent=1), f"\n{done} files are made.\n", number=min(done, 2) + 1)


def play(body):
    """The script's answer to a request."""
    messages = body.get("messages") or []
    shells = {tool["function"]["name"]: tool["function"].get("parameters") for tool in body.get("tools") or []}
    name = next((shell for shell in SHELLS if shell in shells), None)
    if name is None:
        if any("keystrokes" in text_of(message.get("content")) for message in messages[:2]):
            return terminus_turn(done_in(messages))
        wanted = body.get("response_format") or {}
        if wanted.get("type") == "json_schema":
            return Turn(schema_answer((wanted.get("json_schema") or {}).get("schema") or {}))
        return Turn("Make two files")
    done = done_in(messages)
    if done < 2:
        number = done + 1
        arguments = shell_arguments(shells[name], command_of(number))
        reasoning = f"\nThe task wants two files. Number {number} is next.\n"
        return Turn(f"I make file number {number} now.", reasoning, (name, arguments), number)
    # mini-swe-agent ends only when this command runs.
    if any("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in text_of(message.get("content")) for message in messages[:2]):
        arguments = {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}
        return Turn("Both files are there.", "\nNothing is left to do.\n", (name, arguments), 3)
    return Turn(LAST_TEXT, "\nNothing is left to do.\n", number=3)


# ---------------------------------------------------------------------------------------------------------------------
# Replies


class Wants:
    """What the request asked for beyond the text."""

    def __init__(self, body):
        self.ids = body.get("return_token_ids") is True
        self.logprobs = body.get("logprobs") is True
        self.id_strings = body.get("return_tokens_as_token_ids") is True
        self.versions = body.get("return_weight_versions") is True
        self.usage = (body.get("stream_options") or {}).get("include_usage") is True


def logprobs_of(wants, ids):
    return {"content": [token_of(number, wants.id_strings) for number in ids]} if wants.logprobs else None


def usage_of(prompt, sampled):
    return {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + len(sampled), "completion_tokens": len(sampled)}


def versions_of(sampled):
    return [{"version": "7", "start": 0, "end": len(sampled)}]


def whole_reply(turn, wants, prompt, reply_id, model):
    """A reply that is not streamed."""
    sampled = [number for _, _, ids in turn.parts() for number in ids]
    message = {
        "role": "assistant",
        "content": turn.text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": turn.reasoning,
    }
    if turn.call:
        function = {"name": turn.call[0], "arguments": json.dumps(turn.call[1], ensure_ascii=False)}
        message["tool_calls"] = [{"id": f"chatcmpl-tool-{reply_id}", "type": "function", "function": function}]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": logprobs_of(wants, sampled),
        "finish_reason": turn.finish_reason,
        "stop_reason": None,
        "token_ids": sampled if wants.ids else None,
        "routed_experts": None,
        "weight_versions": versions_of(sampled) if wants.versions else None,
    }
    return {
        "id": f"chatcmpl-{reply_id}",
        "object": "chat.completion",
        "created": CREATED,
        "model": model,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": "vllm-0.33.0-lego",
        "usage": {**usage_of(prompt, sampled), "prompt_tokens_details": None},
        "prompt_logprobs": None,
        "prompt_token_ids": prompt if wants.ids else None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "metrics": None,
    }


def groups_of(text, ids):
    """A part's chunks: some tokens and their text."""
    cut = list(pieces(text))
    for start in range(0, len(ids), TOKENS_PER_CHUNK):
        yield "".join(cut[start : start + TOKENS_PER_CHUNK]), ids[start : start + TOKENS_PER_CHUNK]


def stream_events(turn, wants, prompt, reply_id, model):
    """A stream's events: (kind, what the client gets of it as text, ids, the event's data)."""
    head = {"id": f"chatcmpl-{reply_id}", "object": "chat.completion.chunk", "created": CREATED, "model": model}

    def chunk(delta, ids, **more):
        choice = {"index": 0, "delta": delta, "logprobs": logprobs_of(wants, ids), "finish_reason": None, **more}
        choice["token_ids"] = ids if wants.ids else None
        return json.dumps({**head, "choices": [choice], "kv_transfer_params": None}, ensure_ascii=False)

    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    shown = prompt if wants.ids else None
    yield "role", "", [], json.dumps({**head, "choices": [first], "prompt_token_ids": shown, "prompt_text": None})
    sampled = [number for _, _, ids in turn.parts() for number in ids]
    parts = turn.parts()
    for kind, text, ids in parts[:-1]:
        if kind == "hidden":
            # The parser swallowed the text: such a chunk exists only for its ids or log-probs.
            if wants.ids or wants.logprobs:
                yield kind, "", ids, chunk({}, ids)
        elif kind == "name":
            function = {"name": turn.call[0], "arguments": ""}
            call = {"index": 0, "id": f"chatcmpl-tool-{reply_id}", "type": "function", "function": function}
            yield kind, "", ids, chunk({"tool_calls": [call]}, ids)
        elif kind == "arguments":
            for piece, some in groups_of(text, ids):
                yield kind, piece, some, chunk({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}, some)
        else:
            for piece, some in groups_of(text, ids):
                yield kind, piece, some, chunk({kind: piece}, some)
    last = {"finish_reason": turn.finish_reason, "stop_reason": None}
    if wants.versions:
        last["weight_versions"] = versions_of(sampled)
    yield "finish", "", parts[-1][2], chunk({}, parts[-1][2], **last)
    if wants.usage:
        usage = {**head, "choices": [], "usage": usage_of(prompt, sampled), "system_fingerprint": "vllm-0.33.0-lego"}
        yield "usage", "", [], json.dumps(usage)
    yield "done", "", [], "[DONE]"


# ---------------------------------------------------------------------------------------------------------------------
# The server


class Upstream(ThreadingHTTPServer):
    """The server and what it remembers."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port=0, fault="none", log=None):
        super().__init__(("127.0.0.1", port), Handler)
        assert fault in FAULTS, fault
        self.lock = threading.Lock()
        self.fault = fault
        self.count = 0
        # One entry a request, in the order of arrival.
        self.entries = []
        self.log = open(log, "w", encoding="utf-8") if log else None

    @property
    def base_url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def new_entry(self, **about):
        with self.lock:
            self.count += 1
            entry = {"number": self.count, "at": time.time(), **about}
            self.entries.append(entry)
            return entry

    def take_fault(self, turn):
        """The fault for this request, if it is its turn: the conversation's first call, once."""
        with self.lock:
            if turn.number is None or self.fault == "none":
                return "none"
            fault, self.fault = self.fault, "none"
            return fault

    def finished(self, entry):
        if self.log:
            with self.lock:
                self.log.write(json.dumps(entry, ensure_ascii=False) + "\n")
                self.log.flush()

    def handle_error(self, request, client_address):
        """A client that leaves is no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Small writes must not wait for an acknowledgement.
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_GET(self):
        entry = self.server.new_entry(path=self.path, method="GET")
        if self.path.rstrip("/").endswith("/models"):
            model = {"id": MODEL, "object": "model", "created": CREATED, "owned_by": "vllm", "max_model_len": 131072}
            self.answer(entry, 200, {"object": "list", "data": [model]})
        elif self.path == "/health":
            self.answer(entry, 200, {})
        else:
            self.error(entry, 404, "NotFoundError", "there is no such route")

    def do_POST(self):
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        # vLLM takes no notice of a query.
        path, _, query = self.path.partition("?")
        entry = self.server.new_entry(path=path, query=query, method="POST", headers=dict(self.headers.items()))
        try:
            entry["body"] = body = json.loads(raw)
            if path == "/v1/chat/completions":
                check(body)
                self.chat(entry, body)
            elif path == "/tokenize":
                ids = encode(body["prompt"]) if "prompt" in body else render(body.get("messages"), body.get("tools"))
                self.answer(entry, 200, {"tokens": ids, "count": len(ids), "max_model_len": 131072, "token_strs": None})
            else:
                self.error(entry, 404, "NotFoundError", "there is no such route")
        except (BadRequest, ValueError, KeyError, TypeError, AttributeError) as error:
            self.error(entry, 400, "BadRequestError", f"{type(error).__name__}: {error}")

    def answer(self, entry, status, value, headers=()):
        data = json.dumps(value, ensure_ascii=False).encode()
        entry["status"] = status
        # Before the answer: whoever reads the log after the answer finds it there.
        self.server.finished(entry)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, text in headers:
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)

    def error(self, entry, status, kind, message, headers=()):
        about = {"message": f"{message} (request {entry['number']})", "type": kind, "param": None, "code": status}
        entry["error"] = about["message"]
        self.answer(entry, status, {"error": about}, headers)

    def chat(self, entry, body):
        prompt = render(body.get("messages"), body.get("tools"))
        turn, wants = play(body), Wants(body)
        sampled = [number for _, _, ids in turn.parts() for number in ids]
        fault = self.server.take_fault(turn)
        entry.update(turn=turn.number, fault=fault, stream=bool(body.get("stream")), prompt=prompt, sampled=sampled)
        entry["reply_id"] = reply_id = f"{entry['number']:08x}"
        if fault == "500_once":
            return self.error(entry, 500, "InternalServerError", "scripted fault")
        if fault == "429_once":
            headers = [("Retry-After", str(RETRY_AFTER_SECS))]
            return self.error(entry, 429, "RateLimitError", "scripted fault", headers)
        if body.get("stream"):
            return self.stream(entry, stream_events(turn, wants, prompt, reply_id, body.get("model")))
        reply = whole_reply(turn, wants, prompt, reply_id, body.get("model"))
        if fault not in CUTS:
            return self.answer(entry, 200, reply)
        data = json.dumps(reply, ensure_ascii=False).encode()
        entry["status"] = 200
        self.server.finished(entry)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: data.find(HALF.encode())])
        self.cut(entry)

    def stream(self, entry, events):
        entry["status"] = 200
        entry["sent"] = sent = []
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        arguments = ""
        for kind, text, ids, data in events:
            frame = f"data: {data}\n\n".encode()
            sent += ids
            arguments += text if kind == "arguments" else ""
            is_half = entry["fault"] in CUTS and HALF in arguments
            if kind == "done" or is_half:
                self.server.finished(entry)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(frame), frame))
            if is_half:
                return self.cut(entry)
        self.wfile.write(b"0\r\n\r\n")

    def cut(self, entry):
        """Breaks the connection off."""
        self.wfile.flush()
        # Lets the reader take what was sent, so that the cut comes in the middle of a reply that it has seen.
        time.sleep(0.2)
        if entry["fault"] == "drop_mid_stream":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True
        self.connection.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log")
    parser.add_argument("--fault", choices=FAULTS, default="none")
    options = parser.parse_args()
    server = Upstream(options.port, options.fault, options.log)
    print(server.base_url, flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
