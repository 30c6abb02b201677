"""Clients in front of stacks, each in a process of its own, and the CPU that the measured processes spend meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import psutil

from loadtest.gateway.client import Load
from loadtest.gateway.stacks import Stack
from loadtest.processes import BenchError, cpu_seconds, keep_to

DRIVE_SECONDS = 300


def drive(stack: Stack, load: Load) -> dict[str, Any]:
    """Return the fields of Seen, and `cpu`: seconds of the measured processes. Raises BenchError."""
    return drive_all([stack], load)[0]


def drive_all(stacks: Sequence[Stack], load: Load) -> list[dict[str, Any]]:
    """Put the same load on several stacks at once."""
    before = [cpu_seconds(stack.measured) for stack in stacks]
    program = [sys.executable, "-m", "loadtest.gateway.client"]
    clients = [
        psutil.Popen(
            [*program, str(stack.port), stack.model, json.dumps(asdict(load))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=keep_to(stack.client_cores),
        )
        for stack in stacks
    ]
    try:
        outputs = [client.communicate(timeout=DRIVE_SECONDS) for client in clients]
    finally:
        for client in clients:
            if client.poll() is None:
                client.kill()
    seen = [_read(client.returncode, *output) for client, output in zip(clients, outputs, strict=True)]
    after = [cpu_seconds(stack.measured) for stack in stacks]
    return [each | {"cpu": late - early} for each, early, late in zip(seen, before, after, strict=True)]


def _read(status: int, output: bytes, complaint: bytes) -> dict[str, Any]:
    if status:
        raise BenchError(f"the client ended with {status}: {complaint.decode(errors='replace')[-1000:]}")
    seen: dict[str, Any] = json.loads(output)
    if seen["errors"]:
        raise BenchError(f"{len(seen['errors'])} requests failed: {seen['errors'][0]}")
    return seen
