"""What the programs on the Python SDKs share: the task, the agent's loop, and the reading of fixtures.

A stream that ends without the protocol's own end must raise an exception, here or in the SDK. The agent then asks for
the turn again, once; a stream that breaks and ends as if it were whole ends the program with an error.
"""

import json
import subprocess

PROMPT = "Make the files made_by_turn1.txt and made_by_turn2.txt, one after the other, with the shell."
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
# What lego asks the upstream for must not reach who did not ask for it; null is what engines write then.
FOREIGN = ("prompt_token_ids", "token_ids", "weight_versions")


class CleanEndOfABrokenStream(Exception):
    """The stream ended as if it were whole, but its end is missing."""


def clean(reply):
    # SGLang's own, sent to all.
    text = reply.model_dump_json(exclude={"metadata"})
    for name in FOREIGN:
        assert f'"{name}":[' not in text, f"{name} in {text}"


def run(command):
    done = subprocess.run(["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.stdout + done.stderr


def converse(turn, result):
    """Runs the agent to its end. `turn` asks for a turn and gives its tool calls, (id, command); `result` takes what a
    command printed. Returns the exit code."""
    retried = False
    for _ in range(8):
        try:
            calls = turn()
        except (CleanEndOfABrokenStream, AssertionError) as error:
            # What must never happen.
            print(f"{type(error).__name__}: {error}")
            return 3
        except Exception as error:
            print(f"{type(error).__module__}.{type(error).__name__}: {error}")
            if retried:
                raise
            retried = True
            continue
        if not calls:
            return 0
        for call_id, command in calls:
            print(f"bash: {command}")
            result(call_id, run(command))
    print("the model never came to an end")
    return 4


def read_fixtures(read, fixtures):
    """Prints what the SDK reads of each fixture, one JSON line each. A fixture is NAME:whole, NAME:stream or
    NAME:half, a stream that breaks off in its middle. `read` takes whether it is a stream, and the headers by which the
    upstream knows what to send."""
    for fixture in fixtures:
        name, how = fixture.split(":")
        try:
            said = read(how != "whole", {"x-fixture": name, "x-half": str(how == "half")})
        except Exception as error:
            said = {"error": type(error).__name__, "about": str(error)}
        print(json.dumps({"fixture": fixture, **said}), flush=True)
    return 0
