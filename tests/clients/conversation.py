"""The conversation that the scripted upstream plays: its toy tokenizer, its prompts, and the model's turns.

Token ids: a toy tokenizer of whole characters, up to three bytes a token, whose ids can be decoded. A prompt is
rendered from messages and tools as chat templates of the Qwen family do it, piece by piece, so that a conversation
that only grows has ids that only grow: the ids of turn 1's prompt and completion are a prefix of turn 2's prompt.
"""

import json

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


def logprob_of(number):
    """Any number that differs from token to token and is exact in 32 bits."""
    return -((number % 61) + 1) / 32


def token_of(number, with_id=False):
    """One token as log-probs tell it, or with its id in place of its text."""
    text = f"token_id:{number}" if with_id else decode([number])
    return {
        "token": text,
        "logprob": logprob_of(number),
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
