#!/usr/bin/env python3
"""A scripted upstream in vLLM's shapes: POST /v1/chat/completions, POST /v1/completions with a prompt of ids, GET
/v1/models, POST /tokenize. Standard library only.

usage: upstream.py [--port N] [--log FILE] [--fault FAULT]

It prints its base URL. The conversation it plays: turn 1 is reasoning, text and one call of the client's shell tool
that makes made_by_turn1.txt; turn 2 the same for made_by_turn2.txt; turn 3 is a final text. Clients without a shell
tool that speak terminus-2's JSON in text get the same in that form. Any other call without tools (a title, a summary)
gets a short text. The fault strikes the first call of the conversation, once.

Every command leaves a trace: it appends `begin` to traceN.txt, makes its file, appends `end`. A client that executes
half a command, or one command twice, is found out by it.

The log has one JSON line a request: number, path, headers, body, fault, what was answered, and the token ids.
"""

import argparse
import codecs
import json
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from conversation import SPECIAL_ID, BadRequest, check, encode, logprob_of, pieces, play, render, token_of
from tokens import Vocabulary, spelled

MODEL = "lego-test"
CREATED = 1_796_000_000
# drop: a reset of the connection; close: its end without the body's end.
FAULTS = ("none", "500_once", "429_once", "drop_mid_stream", "close_mid_stream")
CUTS = ("drop_mid_stream", "close_mid_stream")
RETRY_AFTER_SECS = 2
TOKENS_PER_CHUNK = 4
# A reply is cut where this has been sent: half of the command is out, and could already be run.
HALF = "echo 'made"


# ---------------------------------------------------------------------------------------------------------------------
# Replies


class Wants:
    """What the request asked for beyond the text."""

    def __init__(self, body):
        self.ids = body.get("return_token_ids") is True
        # Completions take the number of alternatives, which may be 0.
        self.logprobs = body.get("logprobs") is True or type(body.get("logprobs")) is int
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
# Replies of completions


def said_by(turn):
    """What a client should get to see of a turn."""
    calls = [[turn.call[0], spelled(turn.call[1])]] if turn.call else []
    return {"text": turn.text, "calls": calls}


def check_completions(body, vocabulary):
    """Refuses what vLLM refuses, and what is no prompt of this test."""
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or not all(number in vocabulary.bytes for number in prompt):
        raise BadRequest("prompt is not a list of this model's token ids")
    if isinstance(body.get("logprobs"), bool):
        raise BadRequest("logprobs is not a number")
    if body.get("stream_options") is not None and not body.get("stream"):
        raise BadRequest("stream_options needs stream")
    if "max_tokens" not in body:
        raise BadRequest("max_tokens is left out: vLLM samples 16 tokens then")
    for name in ("messages", "tools", "tool_choice", "max_completion_tokens"):
        if name in body:
            raise BadRequest(f"{name} is chat's")


class Completions:
    """Replies of one vocabulary. Their texts are as vLLM's: without special tokens, and in whole characters."""

    def __init__(self, vocabulary, turn, wants, prompt, reply_id, model):
        self.vocabulary, self.wants, self.prompt = vocabulary, wants, prompt
        self.parts = vocabulary.parts(turn)
        self.sampled = [number for _, _, ids in self.parts for number in ids]
        self.head = {"id": f"cmpl-{reply_id}", "object": "text_completion", "created": CREATED, "model": model}
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def choice(self, ids, is_first, is_last):
        special, wants = self.vocabulary.special, self.wants
        data = b"".join(self.vocabulary.bytes[number] for number in ids if number not in special)
        choice = {
            "index": 0,
            "text": self.decoder.decode(data, is_last),
            "logprobs": self.logprobs(ids) if wants.logprobs else None,
            "finish_reason": "stop" if is_last else None,
            "stop_reason": None,
            "token_ids": ids if wants.ids else None,
        }
        if is_first:
            choice["prompt_token_ids"] = self.prompt if wants.ids else None
        if is_last and wants.versions:
            choice["weight_versions"] = versions_of(self.sampled)
        return choice

    def logprobs(self, ids):
        texts = [self.vocabulary.decode([number]) for number in ids]
        return {
            "text_offset": [0] * len(ids),
            "token_logprobs": [logprob_of(number) for number in ids],
            "tokens": [f"token_id:{number}" for number in ids] if self.wants.id_strings else texts,
            "top_logprobs": [{text: logprob_of(number)} for text, number in zip(texts, ids, strict=True)],
        }

    def whole(self):
        """A reply that is not streamed."""
        choice = {**self.choice(self.sampled, True, True), "prompt_logprobs": None, "routed_experts": None}
        usage = {**usage_of(self.prompt, self.sampled), "prompt_tokens_details": None}
        return {**self.head, "choices": [choice], "usage": usage, "kv_transfer_params": None}

    def events(self):
        """A stream's events: (kind, the text of its tokens, ids, the event's data)."""
        groups = [
            (kind, ids[start : start + TOKENS_PER_CHUNK])
            for kind, _, ids in self.parts
            for start in range(0, len(ids), TOKENS_PER_CHUNK)
        ]
        for number, (kind, ids) in enumerate(groups):
            choice = self.choice(ids, number == 0, number + 1 == len(groups))
            data = json.dumps({**self.head, "choices": [choice]}, ensure_ascii=False)
            yield kind, self.vocabulary.decode(ids), ids, data
        if self.wants.usage:
            usage = usage_of(self.prompt, self.sampled)
            yield "usage", "", [], json.dumps({**self.head, "choices": [], "usage": usage})
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
        self.vocabulary = Vocabulary()
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
            elif path == "/v1/completions":
                check_completions(body, self.server.vocabulary)
                self.completions(entry, body)
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
        about = turn, wants, prompt, f"{entry['number']:08x}", body.get("model")
        sampled = [number for _, _, ids in turn.parts() for number in ids]
        self.reply(entry, body, turn, prompt, sampled, lambda: whole_reply(*about), lambda: stream_events(*about))

    def completions(self, entry, body):
        prompt = body["prompt"]
        messages, tools = self.server.vocabulary.read(prompt)
        turn = play({"messages": messages, "tools": tools})
        about = turn, Wants(body), prompt, f"{entry['number']:08x}", body.get("model")
        reply = Completions(self.server.vocabulary, *about)
        entry.update(read=messages, said=said_by(turn))
        self.reply(entry, body, turn, prompt, reply.sampled, reply.whole, reply.events)

    def reply(self, entry, body, turn, prompt, sampled, whole, events):
        """Answers with what `whole` or `events` gives, or with the fault."""
        fault = self.server.take_fault(turn)
        entry.update(turn=turn.number, fault=fault, stream=bool(body.get("stream")), prompt=prompt, sampled=sampled)
        entry["reply_id"] = f"{entry['number']:08x}"
        if fault == "500_once":
            return self.error(entry, 500, "InternalServerError", "scripted fault")
        if fault == "429_once":
            headers = [("Retry-After", str(RETRY_AFTER_SECS))]
            return self.error(entry, 429, "RateLimitError", "scripted fault", headers)
        if body.get("stream"):
            return self.stream(entry, events())
        if fault not in CUTS:
            return self.answer(entry, 200, whole())
        data = json.dumps(whole(), ensure_ascii=False).encode()
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
