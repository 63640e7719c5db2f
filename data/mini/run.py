"""Runs the tests of this folder: python3 -I -S -B tests/run.py

A test file names one function and its cases; every case is a named test. Prints PASS, or the first failure.
A call that raises, never ends or grows without bound counts as ERR: what a test finds does not depend on the
speed of the machine.
"""

import os
import sys

MAX_STEPS = 1000  # lines executed in one call
MAX_BITS = 4096
MAX_LENGTH = 4096
MAX_SHOWN = 60
MAX_LINE = 90


class Exhausted(Exception):
    """A call went over its budget."""


def budget():
    """A trace function that stops a call which runs too long or holds a value too large."""
    steps = 0

    def trace(frame, event, _):
        nonlocal steps
        if event == "line":
            steps += 1
            if steps > MAX_STEPS:
                raise Exhausted
            for value in frame.f_locals.values():
                if isinstance(value, int):
                    if value.bit_length() > MAX_BITS:
                        raise Exhausted
                elif isinstance(value, (str, list)) and len(value) > MAX_LENGTH:
                    raise Exhausted
        return trace

    return trace


def call(function, arguments):
    """repr of what the function returns, or ERR."""
    arguments = [list(value) if isinstance(value, list) else value for value in arguments]
    sys.settrace(budget())
    try:
        result = function(*arguments)
        sys.settrace(None)
        return repr(result)
    except Exception:
        return "ERR"
    finally:
        sys.settrace(None)


def load(source, name):
    """The function `name` of a program, or None if there is none."""
    namespace = {"__name__": "program"}
    try:
        exec(compile(source, "program", "exec"), namespace)
        return namespace.get(name)
    except Exception:
        return None


def failure(name, function, arguments, want):
    """The line that reports a failed case, or None."""
    got = call(function, arguments)
    if got == repr(want):
        return None
    shown = ", ".join(map(repr, arguments))
    return f"FAIL {name}({shown}) = {got[:MAX_SHOWN]}, want {repr(want)[:MAX_SHOWN]}"[:MAX_LINE]


def main():
    tests = os.path.dirname(os.path.abspath(__file__))
    for file in sorted(os.listdir(tests)):
        if not (file.startswith("test_") and file.endswith(".py")):
            continue
        suite = {}
        with open(os.path.join(tests, file)) as text:
            exec(text.read(), suite)
        with open(os.path.join(tests, "..", suite["FILE"])) as text:
            function = load(text.read(), suite["FUNCTION"])
        for arguments, want in suite["CASES"].values():
            line = failure(suite["FUNCTION"], function, arguments, want)
            if line:
                print(line)
                return 1
    print("PASS")
    return 0


if __name__ == "__main__":
    sys.exit(main())
