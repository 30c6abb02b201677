"""Clients before a stack: each a process of its own, what it saw, and what the router spent meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from loadtest.gateway.stacks import Stack
from loadtest.processes import BenchError, cpu_seconds, keep_to

DRIVE_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Case:
    """What a client does. `per_second` requests of all its connections together; 0: each as soon as it is answered."""

    connections: int
    requests: int
    max_tokens: int = 1
    stream: bool = False
    per_second: float = 0.0

    def command(self, stack: Stack) -> list[str]:
        """Whom it asks is the stack."""
        command = [sys.executable, "-m", "loadtest.gateway.client", "--port", str(stack.port), "--model", stack.model]
        command += ["--connections", str(self.connections), "--requests", str(self.requests)]
        command += ["--max-tokens", str(self.max_tokens), "--per-second", str(self.per_second)]
        return [*command, *(["--stream"] if self.stream else [])]


def drive(stack: Stack, case: Case) -> dict[str, Any]:
    """What the client saw, and `cpu`: seconds of the router meanwhile. Raises BenchError."""
    return drive_all([stack], case)[0]


def drive_all(stacks: Sequence[Stack], case: Case) -> list[dict[str, Any]]:
    """The same before each of several stacks, at the same time."""
    before = [cpu_seconds(stack.measured) for stack in stacks]
    clients = [
        psutil.Popen(
            case.command(stack),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=keep_to(stack.client_cores),
        )
        for stack in stacks
    ]
    try:
        told = [client.communicate(timeout=DRIVE_SECONDS) for client in clients]
    finally:
        for client in clients:
            if client.poll() is None:
                client.kill()
    seen = [_read(client.returncode, *words) for client, words in zip(clients, told, strict=True)]
    after = [cpu_seconds(stack.measured) for stack in stacks]
    return [each | {"cpu": late - early} for each, early, late in zip(seen, before, after, strict=True)]


def _read(status: int, told: bytes, complaint: bytes) -> dict[str, Any]:
    if status:
        raise BenchError(f"the client ended with {status}: {complaint.decode(errors='replace')[-1000:]}")
    seen: dict[str, Any] = json.loads(told)
    if seen["errors"]:
        raise BenchError(f"{len(seen['errors'])} requests failed: {seen['errors'][0]}")
    return seen
