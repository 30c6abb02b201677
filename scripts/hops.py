#!/usr/bin/env python3
"""Count the files and functions of Weft that three journeys enter: `.venv/bin/python scripts/hops.py [--list] [TREE]`.

chat: a chat completion on a warm mesh of one worker, HTTP request to first SSE frame, all processes. block: the same
with prefill and decode apart, only the workers' packages that move KV. start: `weft up` until it is ready, only the
process that the user starts, imports included. A profiler in every process records while the flag file holds a 1.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

ROOT = Path(sys.argv[-1] if sys.argv[1:] not in ([], ["--list"]) else Path(__file__).parents[1]).resolve()
READY = "curl -sfo /dev/null --retry 300 --retry-delay 1 --retry-all-errors"  # gives up after five minutes
PACKAGES = ("services/", "libs/", "kernels/")
KV_PACKAGES = ("/weft/kv/", "/weft/worker/", "/weft/rpc/", "/prefill/", "/decode/")
PROFILER = """
import mmap, os, sys, threading
flag, seen = mmap.mmap(os.open(os.environ["HOPS"] + "/flag", os.O_RDONLY), 1, access=mmap.ACCESS_READ), set()
def profile(frame, event, arg):
    if event == "call" and flag[0] == 49 and (os.getpid(), frame.f_code) not in seen:
        seen.add((os.getpid(), frame.f_code))
        with open(f"{os.environ['HOPS']}/{os.getpid()}.calls", "a") as out:
            print(frame.f_code.co_filename, frame.f_code.co_qualname, sep=chr(9), file=out)
if os.environ["HOPS_PARENT"] in ("", str(os.getppid())):
    sys.setprofile(profile)
    threading.setprofile(profile)
"""


def ask(base: str) -> None:
    """Send one streamed chat completion and return at its first frame."""
    body = {"messages": [{"role": "user", "content": f"Hello {os.urandom(4).hex()}"}], "stream": True, "max_tokens": 8}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(base + "/v1/chat/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=120).readline()


def read_calls(path: Path) -> set[tuple[str, ...]]:
    """Return the functions of this tree that one process entered: file, qualified name."""
    rows = {tuple(line.removeprefix(f"{ROOT}/").split("\t")) for line in path.read_text().splitlines()}
    return {(file, name) for file, name in rows if file.startswith(PACKAGES) and "generated" not in file}


def trace(journey: str, port: int) -> set[tuple[str, ...]]:
    """Start a mesh, record one journey and return the functions that it entered."""
    base, parent = f"http://127.0.0.1:{port}", str(os.getpid()) if journey == "start" else ""
    with tempfile.TemporaryDirectory() as home:
        Path(home, "sitecustomize.py").write_text(PROFILER)
        Path(home, "flag").write_text("1" if journey == "start" else "0")
        switch = os.open(f"{home}/flag", os.O_WRONLY)
        paths = [home, *(str(ROOT / part) for part in (*PACKAGES, "protos/generated"))]
        command = f"{sys.executable} -m weft.cli.main up --port {port} --grpc-port {port + 100}".split()
        command += [] if journey == "block" else ["--both", "1"]
        environment = os.environ | {"HOPS": home, "HOPS_PARENT": parent, "PYTHONPATH": ":".join(paths)}
        mesh = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            subprocess.run([*READY.split(), base + "/ready"], check=True)
            for value in "" if journey == "start" else "01":
                os.pwrite(switch, value.encode(), 0)  # in place: a truncated file would end the processes that map it
                ask(base)
            os.pwrite(switch, b"0", 0)
            calls = {(path.stem, *call) for path in Path(home).glob("*.calls") for call in read_calls(path)}
        finally:
            mesh.terminate()
            mesh.wait(60)
    workers = {pid for pid, file, _ in calls if "weft/engine/" in file}
    block = {call for call in calls if call[0] in workers and any(part in call[1] for part in KV_PACKAGES)}
    return {call[1:] for call in (block if journey == "block" else calls)}


for port, journey in enumerate(("chat", "block", "start"), 18400):
    entered = trace(journey, port)
    files = sorted({file for file, _ in entered})
    print(f"{journey}: {len(files)} files, {len(entered)} functions", *files * ("--list" in sys.argv), sep="\n  ")
