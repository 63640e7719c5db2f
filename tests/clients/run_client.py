#!/usr/bin/env python3
"""Runs one coding client through `lego proxy` against the scripted upstream, and checks what must hold.

usage: run_client.py CLIENT[:WIRE]... [--relay RELAY] [--fault FAULT]... [--lego FILE] [--clients FOLDER] [--json]
                     [--keep] [--list]

CLIENT `ci` is all clients that CI runs, `all` all there are. Without --fault these are run: none, 500_once, 429_once,
drop_mid_stream. One line a run; the exit code is 1 if a run failed. What must hold in each:

- the client came to its end, and both files are there with their contents (where a fault ends a client by its own
  design, the table below says so);
- no half of a command was executed, and none twice;
- each request that reached the upstream has its one record, with the right status, exactly the prompt's and the
  completion's token ids and log-probs, and, if the reply came whole, the verdict that it is trainable;
- each turn's prompt extends the last one's prompt and completion, or the table says why this client's history does not,
  and the ids differ for that reason;
- after a 429 nobody calls before Retry-After is over;
- nothing else was asked of the upstream.

With --relay token_in lego renders the prompts, and the upstream has a tokenizer of its own (tokens.py). Then also:

- each turn's prompt extends the last one's prompt and completion, as ids, whatever the client did to its history, but
  for as many turns as the table says; the record names the call that it extends;
- no call was asked in chat's words, but where the table says why;
- a prompt is made of control tokens where the template has them and nowhere else, and says what the client said (Chat);
- the record's text and tool calls are what was sampled, arguments byte by byte.

By either relay `lego capture lineages` has the task's turns in one lineage, or tells the breaks and reasons of the
table, and the ledger adds up.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import checks
import conversation
import tokens
import upstream as scripted
from checks import CHAT, COMPLETIONS
from clients import CLIENTS, Place
from lego_process import Failed, Lego

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FAULTS = ("none", "500_once", "429_once", "drop_mid_stream")


# ---------------------------------------------------------------------------------------------------------------------
# What runs beside the client


class Outside:
    """A proxy that refuses: what a client wants from outside of this machine is noted and gets nothing."""

    def __init__(self):
        self.hosts = set()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.refuse, args=(connection,), daemon=True).start()

    def refuse(self, connection):
        with connection:
            try:
                connection.settimeout(10)
                words = connection.recv(4096).split(b"\r\n")[0].split()
                if len(words) > 1:
                    self.hosts.add(words[1].decode("latin1"))
                connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            except OSError:
                pass


class Nothing:
    """No lego: what the client does with the upstream itself."""

    process = None

    def __init__(self, url):
        self.url = url

    def stop(self):
        pass


def run_client(client, wire, place, folder, outside, timeout):
    """Runs the client in a fresh home and work folder. Returns its exit code, or None if it had to be ended."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    subprocess.run(["git", "init", "-q", "."], cwd=work, check=True, stdin=subprocess.DEVNULL)
    arguments, more = client.command(wire, place)
    system = [str(Path(shutil.which("node") or "/usr/bin/node").parent), "/usr/local/bin", "/usr/bin", "/bin"]
    environment = {
        "PATH": os.pathsep.join([*client.path(place), *dict.fromkeys(system)]),
        "HOME": str(home),
        "TMUX_TMPDIR": str(home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "CI": "true",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "HTTPS_PROXY": outside.url,
        "HTTP_PROXY": outside.url,
        **more,
    }
    with open(folder / "client.log", "wb") as log:
        process = subprocess.Popen(
            arguments,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Whatever it left running is in its session; it is over when the client is.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            # A terminal server leaves the session that it was started in.
            for server in home.glob("tmux-*/*"):
                subprocess.run(["tmux", "-S", str(server), "kill-server"], capture_output=True, check=False)


# ---------------------------------------------------------------------------------------------------------------------
# A run


def run(client, wire, fault, options):
    """One run. Returns its report."""
    folder = Path(tempfile.mkdtemp(prefix="lego-client-"))
    problems, notes = [], []
    started = time.monotonic()
    about = {"client": client.name, "wire": wire, "relay": options.relay, "fault": fault}
    report = {**about, "problems": problems, "notes": notes}
    outside = Outside()
    server = scripted.Upstream(fault=fault, log=folder / "upstream.jsonl")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # A failure is the client's to see, unless asked otherwise. Sampling as in training: every whole reply is trainable.
    settings = {"max_retries": options.max_retries, "pinned_sampling": {"temperature": 1, "seed": 1}}
    with_tokens = options.relay == "token_in"
    if with_tokens:
        settings |= {"relay": "token_in", "local_tokenizer": str(tokens.make_model(folder / "model"))}
    lego = None
    try:
        lego = (
            Nothing(server.base_url)
            if options.direct
            else Lego(options.lego, folder, server.base_url, **settings)
        )
        session = f"{client.name}-{wire}-{fault}".replace("_", "-")
        place = Place(options.clients, folder, HERE, lego.url, f"sk-lego-{session}.secret")
        ended = run_client(client, wire, place, folder, outside, options.timeout)
        report["client_secs"] = round(time.monotonic() - started, 1)
        prompts = lego.counted("lego_proxy_token_in_calls_total", "prompt") if with_tokens else {}
        lego.stop()
        ends = client.ends(wire, fault)
        if ended is None:
            problems.append(f"still running after {options.timeout} s")
        elif (ended == 0) == bool(ends):
            problems.append(f"exit code {ended}" + (f", though the table says: {ends}" if ends else ""))
        if ends:
            notes.append(ends)
        say = problems.append
        checks.check_work(folder / "work", 0 if ends else 2, say)
        entries = [entry for entry in server.entries if entry["path"] in (CHAT, COMPLETIONS)]
        others = {entry["path"] for entry in server.entries} - {CHAT, COMPLETIONS, "/tokenize"}
        queries = sorted({entry["query"] for entry in entries if entry["query"]})
        if queries:
            notes.append(f"the client's query reached the upstream: {queries}")
        if others:
            notes.append(f"also asked: {sorted(others)}")
        report["calls"] = len(entries)
        if not options.direct:
            records = lego.records()
            report["records"] = len(records)
            checks.check_records(records, entries, wire, session, say)
            rows = lego.capture("lineages")
            # It fails where a token is in no account.
            lego.capture("ledger")
        checks.check_fault(fault, entries, say)
        if not ends and client.prints_answer:
            if conversation.LAST_TEXT not in (folder / "client.log").read_text(errors="replace"):
                say("the client did not print the model's last text")
        if with_tokens:
            notes += checks.check_prompts(prompts, entries, client.why_in_chat.get(wire), say)
            checks.check_said(entries, say)
            checks.check_read(entries, wire, say)
            checks.check_parents(entries, say)
        if not ends:
            if with_tokens:
                notes += checks.check_breaks(*client.breaks(wire, fault), entries, server.vocabulary, say)
            else:
                notes += checks.check_history(*client.rewrites(wire, fault), entries, say)
            if not options.direct:
                checks.check_lineages(rows, client.reasons(wire, fault, options.relay), fault, entries, say)
            turns = {entry["turn"] for entry in entries if entry.get("turn") and entry.get("status") == 200}
            if turns != {1, 2, 3}:
                say(f"turns {sorted(turns)} were asked for")
    except Failed as error:
        problems.append(str(error))
    finally:
        if lego and lego.process and lego.process.poll() is None:
            lego.process.kill()
            lego.process.wait()
        server.shutdown()
        server.server_close()
        outside.listener.close()
        report["outside"] = sorted(outside.hosts)
        report["secs"] = round(time.monotonic() - started, 1)
        if problems or options.keep:
            report["folder"] = str(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return report


def show(report, options):
    if options.json:
        print(json.dumps(report), flush=True)
        return
    verdict = "FAILED" if report["problems"] else "ok"
    row = (report["client"], report["wire"], report["fault"], verdict, report.get("calls", 0), report["secs"])
    notes = "; ".join(report["notes"])
    print("%-15s %-17s %-16s %-7s calls %2d %6.1f s  %s" % (*row, notes), flush=True)
    for problem in report["problems"]:
        print(f"    {problem}", flush=True)
    if report["problems"] and "folder" in report:
        for name in ("client.log", "lego.log"):
            path = Path(report["folder"]) / name
            text = path.read_text(errors="replace") if path.exists() else ""
            print(f"    {path}:\n" + "\n".join("        " + line[:300] for line in text.splitlines()[-12:]), flush=True)


def chosen(words):
    """The clients and wires that words name."""
    pairs = []
    for word in words:
        name, _, wire = word.partition(":")
        found = [client for client in CLIENTS if name in (client.name, "all") or name == "ci" and client.is_in_ci]
        if not found or wire and not any(wire in client.wires for client in found):
            raise SystemExit(f"run_client.py: there is no client {word}; --list shows them")
        pairs += [(client, each) for client in found for each in client.wires if wire in ("", each)]
    return pairs


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("client", nargs="*", help="CLIENT, CLIENT:WIRE, ci or all")
    parser.add_argument("--relay", choices=("live", "token_in"), default="live", help="how lego passes replies on")
    parser.add_argument("--fault", action="append", choices=scripted.FAULTS, help="default: every fault")
    parser.add_argument("--lego", default=str(ROOT / "target/debug/lego"), help="lego's binary")
    parser.add_argument("--clients", type=Path, default=ROOT / "target/clients", help="folder that install.sh filled")
    parser.add_argument("--timeout", type=float, default=180, help="most seconds of one run of a client")
    parser.add_argument("--max-retries", type=int, default=0, help="how often lego itself asks the upstream again")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time; default: one a core")
    parser.add_argument("--json", action="store_true", help="one JSON object a run")
    parser.add_argument("--keep", action="store_true", help="keep the folders of good runs too")
    parser.add_argument("--direct", action="store_true", help="without lego (chat only): what the client does alone")
    parser.add_argument("--list", action="store_true", help="show clients and wires")
    options = parser.parse_args()
    if options.direct and options.relay != "live":
        parser.error("--direct is without lego: it has no relay")
    options.clients = options.clients.resolve()
    options.lego = str(Path(options.lego).resolve())
    if options.list:
        for client in CLIENTS:
            print(client.name, *client.wires, "" if client.is_in_ci else "(not in CI)")
        return 0
    faults = options.fault or FAULTS
    runs = [(client, wire, fault) for client, wire in chosen(options.client or ["ci"]) for fault in faults]
    reports = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for report in pool.map(lambda each: run(*each, options), runs):
            reports.append(report)
            show(report, options)
    failed = sum(1 for report in reports if report["problems"])
    if not options.json:
        print(f"clients: {len(reports) - failed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
