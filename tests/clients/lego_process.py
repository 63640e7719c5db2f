"""`lego proxy` as a process, and what it captured."""

import json
import signal
import subprocess
import time
import urllib.request


class Failed(Exception):
    """A run cannot go on."""


class Lego:
    """`lego proxy` as a process, in front of the upstream."""

    def __init__(self, binary, folder, upstream_url, **settings):
        self.binary, self.folder = binary, folder
        self.captures = folder / "captures"
        config = {
            "proxy": {
                "listen_port": 0,
                "upstream_base_url": f"{upstream_url}/v1",
                "upstream_kind": "vllm",
                "capture_dir": str(self.captures),
                **settings,
            }
        }
        path = folder / "proxy_config.json"
        path.write_text(json.dumps(config, indent=2))
        self.log = folder / "lego.log"
        with open(self.log, "wb") as log:
            arguments = [binary, "proxy", "--config", str(path)]
            self.process = subprocess.Popen(arguments, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.url = self.address()

    def address(self):
        """Waits until it says where it listens."""
        while self.process.poll() is None:
            for word in self.log.read_text(errors="replace").split():
                if word.startswith("http://127.0.0.1:") and word.endswith("/v1"):
                    return word.removesuffix("/v1")
            time.sleep(0.05)
        raise Failed(f"lego proxy did not start:\n{self.log.read_text(errors='replace')}")

    def counted(self, name, label):
        """A counter's value for each value of a label, where it is not 0."""
        found = {}
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as page:
            for line in page.read().decode().splitlines():
                if line.startswith(f'{name}{{{label}="'):
                    value, number = line.removeprefix(f'{name}{{{label}="').split('"} ')
                    found[value] = int(float(number))
        return {value: number for value, number in found.items() if number}

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise Failed("lego proxy did not stop within 60 s") from None
        if self.process.returncode != 0:
            raise Failed(f"lego proxy ended with {self.process.returncode}")

    def records(self):
        """Everything that was captured, in order of arrival."""
        calls = []
        for session in self.capture("ls"):
            calls += self.capture("show", session["session_id"])
        return sorted(calls, key=lambda call: (call["received_at"], call["call_id"]))

    def capture(self, *words):
        arguments = [self.binary, "capture", *words, "--json", "--capture-dir", str(self.captures)]
        shown = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if shown.returncode != 0:
            raise Failed(f"{' '.join(arguments[1:])}: {shown.stderr}")
        return [json.loads(line) for line in shown.stdout.splitlines()]
