"""Tokens in, tokens out: how the scripted upstream reads a prompt of ids, and how it spells what it "samples".

The ids are those of the byte-level vocabulary in models/lego-tiny/tokenizer.json, the words around them those of
chat_template.jinja beside this file. A prompt is read back strictly: one that is not turn by turn what the template
writes is refused, as is one in which a message's text became a control token. What is "sampled" is control tokens and
single bytes, spelled as no encoder would spell it, so that text which is tokenized again has other ids.
"""

import json
import shutil
from pathlib import Path

from conversation import BadRequest

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent.parent / "models/lego-tiny"
TEMPLATE = HERE / "chat_template.jinja"

START, END, CALL, CALL_END = "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"
TOOLS, TOOLS_END = "# Tools\n\n<tools>\n", "\n</tools>"
RESULT, RESULT_END = "<tool_response>\n", "\n</tool_response>"
THINK, THINK_END = "<think>\n", "\n</think>\n\n"


def make_model(folder):
    """What lego needs of the upstream's model, in a new folder."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        shutil.copy(MODEL / name, folder)
    shutil.copy(TEMPLATE, folder)
    return folder


def byte_of():
    """The byte that each character of a byte-level vocabulary stands for."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


class Vocabulary:
    """The tokens of a tokenizer.json, which has a byte-level decoder."""

    def __init__(self, path=MODEL / "tokenizer.json"):
        file = json.loads(path.read_text())
        self.control = {token["content"]: token["id"] for token in file["added_tokens"]}
        self.special = {token["id"] for token in file["added_tokens"] if token["special"]}
        table = byte_of()
        self.bytes = {number: text.encode() for text, number in self.control.items()}
        for text, number in file["model"]["vocab"].items():
            self.bytes.setdefault(number, bytes(table[character] for character in text))
        self.of_byte = {data[0]: number for number, data in self.bytes.items() if len(data) == 1}

    def encode(self, text):
        """A control token's id, or an id for each byte."""
        return [self.control[text]] if text in self.control else [self.of_byte[byte] for byte in text.encode()]

    def decode(self, ids):
        return b"".join(self.bytes[number] for number in ids).decode("utf-8", "replace")

    # A prompt -------------------------------------------------------------------------------------------------------

    def read(self, prompt):
        """The messages and tools that a prompt was rendered from."""
        turns = [self.turn(turn) for turn in self.turns(prompt)]
        tools = []
        if turns and turns[0]["role"] == "system" and turns[0]["content"].endswith(TOOLS_END):
            text, found, lines = turns[0]["content"].removesuffix(TOOLS_END).rpartition(TOOLS)
            if not found:
                raise BadRequest("the tools end, but do not begin")
            tools = [json.loads(line) for line in lines.split("\n")]
            if text:
                turns[0]["content"] = text.removesuffix("\n\n")
            else:
                turns.pop(0)
        return turns, tools

    def turns(self, prompt):
        """Cuts a prompt into turns: the ids between the tokens that begin and end one."""
        start, end, line = self.control[START], self.control[END], self.of_byte[ord("\n")]
        turns, at = [], 0
        while prompt[at : at + 1] == [start]:
            if end not in prompt[at:]:
                opening = self.decode(prompt[at + 1 :])
                if opening != "assistant\n":
                    raise BadRequest(f"the prompt ends with {opening[-80:]!r}, not with the assistant's turn")
                return turns
            to = prompt.index(end, at)
            if prompt[to + 1 : to + 2] != [line]:
                raise BadRequest(f"behind turn {len(turns)} is no line break")
            turns.append(prompt[at + 1 : to])
            at = to + 2
        raise BadRequest(f"turn {len(turns)} begins with {self.decode(prompt[at : at + 8])!r}")

    def turn(self, ids):
        """A turn as a message."""
        first = next((index for index, number in enumerate(ids) if number in self.control.values()), len(ids))
        role, _, text = self.text(ids[:first]).partition("\n")
        if role == "assistant":
            return {"role": role, **self.said(text, ids[first:])}
        if first != len(ids):
            raise BadRequest(f"a {role} message has the control token {self.decode(ids[first : first + 1])}")
        if role not in ("system", "user"):
            raise BadRequest(f"unknown role {role!r}")
        if text.startswith(RESULT) and text.endswith(RESULT_END):
            return {"role": "tool", "content": text[len(RESULT) : -len(RESULT_END)]}
        return {"role": role, "content": text}

    def said(self, text, ids):
        """What an assistant said: its words, then calls."""
        message = {}
        if text.startswith(THINK) and THINK_END in text:
            message["reasoning"], _, text = text.removeprefix(THINK).partition(THINK_END)
        calls = []
        while ids:
            if ids[0] != self.control[CALL] or self.control[CALL_END] not in ids:
                raise BadRequest("a call that does not begin, or does not end")
            to = ids.index(self.control[CALL_END])
            call = json.loads(self.text(ids[1:to]))
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
            calls.append({"type": "function", "function": function})
            ids = ids[to + 1 :]
            if ids and ids[0] == self.of_byte[ord("\n")]:
                ids = ids[1:]
        if calls:
            message["tool_calls"] = calls
            text = text.removesuffix("\n")
        return {**message, "content": text}

    def text(self, ids):
        try:
            return b"".join(self.bytes[number] for number in ids).decode()
        except UnicodeDecodeError as error:
            raise BadRequest(f"a turn is not UTF-8: {error}") from None

    # A reply --------------------------------------------------------------------------------------------------------

    def parts(self, turn):
        """What is sampled for a turn: (kind, text, ids) in order; kind: text, or arguments."""
        parts = []
        if turn.reasoning:
            parts += [("text", text) for text in (THINK, turn.reasoning, THINK_END)]
        parts.append(("text", turn.text))
        if turn.call:
            head = '\n{"name": ' + json.dumps(turn.call[0]) + ', "arguments": '
            parts += [("text", "\n"), ("text", CALL), ("text", head), ("arguments", spelled(turn.call[1]))]
            parts += [("text", "}\n"), ("text", CALL_END)]
        parts.append(("text", END))
        return [(kind, text, self.encode(text)) for kind, text in parts]


def spelled(arguments):
    """Arguments as JSON that no client writes: odd spaces, and an escape that needs none."""
    return json.dumps(arguments, separators=(" ,", " :  "), ensure_ascii=False).replace(">", "\\u003e")
