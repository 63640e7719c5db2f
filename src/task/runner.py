"""Runs hidden tests of the form cases/1: runner.py WORKSPACE TESTFILE..., with a nonce on stdin.

The program under test runs in a child that is forked before the nonce and the tests are read; its output
goes nowhere. This process compares, and prints one line a test: nonce, PASS or FAIL, name. The first line is
the nonce and "ready": up to then nothing of the program has run. Exit code 0 if every test passed, else 1.

A call that runs too long or holds a value too large is a failed test, whatever the speed of the machine.
"""

import marshal
import os
import sys

MAX_STEPS = 1000  # lines executed in one call
MAX_BITS = 4096
MAX_LENGTH = 4096
MAX_REPLY = 1 << 20


class Exhausted(Exception):
    """A call went over its budget."""


def budget():
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
    """repr of the result, or nothing."""
    sys.settrace(budget())
    try:
        result = function(*arguments)
        sys.settrace(None)
        return repr(result).encode()
    except Exception:
        return b""
    finally:
        sys.settrace(None)


def load(workspace, file):
    namespace = {"__name__": "program"}
    try:
        with open(os.path.join(workspace, file), encoding="utf-8") as text:
            program = compile(text.read(), file, "exec")
        sys.settrace(budget())
        exec(program, namespace)
    except Exception:
        pass
    finally:
        sys.settrace(None)
    return namespace


def work(workspace, requests, replies):
    """The child: answers calls until there are no more."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    programs = {}
    while True:
        try:
            file, name, arguments = marshal.load(requests)
        except EOFError:
            return
        if file not in programs:
            programs[file] = load(workspace, file)
        reply = call(programs[file].get(name), arguments)
        replies.write(len(reply).to_bytes(4, "little") + reply)
        replies.flush()


def ask(requests, replies, request):
    """The child's reply to one call; None once it is gone."""
    try:
        marshal.dump(request, requests)
        requests.flush()
        length = replies.read(4)
        if len(length) < 4 or int.from_bytes(length, "little") > MAX_REPLY:
            return None
        return replies.read(int.from_bytes(length, "little"))
    except OSError:
        return None


def main(workspace, files):
    request_end, request_start = os.pipe()
    reply_end, reply_start = os.pipe()
    if os.fork() == 0:
        os.close(request_start)
        os.close(reply_end)
        code = 1
        try:
            work(workspace, os.fdopen(request_end, "rb"), os.fdopen(reply_start, "wb"))
            code = 0
        finally:
            os._exit(code)
    os.close(request_end)
    os.close(reply_start)
    requests, replies = os.fdopen(request_start, "wb"), os.fdopen(reply_end, "rb")

    nonce = sys.stdin.readline().strip()
    suites = []
    for file in files:
        suite = {}
        with open(file, encoding="utf-8") as text:
            exec(compile(text.read(), file, "exec"), suite)
        suites.append((suite["FILE"], suite["FUNCTION"], suite["CASES"]))
    print(nonce, "ready", flush=True)

    is_alive, has_failed = True, False
    for file, function, cases in suites:
        for name, (arguments, want) in cases.items():
            reply = ask(requests, replies, (file, function, arguments)) if is_alive else None
            is_alive = is_alive and reply is not None
            passed = reply == repr(want).encode()
            has_failed = has_failed or not passed
            print(nonce, "PASS" if passed else "FAIL", name, flush=True)
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
