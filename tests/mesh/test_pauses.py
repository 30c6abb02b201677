"""Processes of a mesh that stand still and go on, or start again: every request is answered, with nothing but time."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import psutil
import pytest

from tests.mesh.conftest import Mesh, wait_until
from tests.mesh.oracle import text_ids

# longer than peers take to notice it
PAUSE_SECONDS = 2.5
BODY = {"model": "weft-nano", "prompt": list(text_ids()[:50]), "max_tokens": 4}
pytestmark = pytest.mark.timeout(300)


def post(mesh: Mesh) -> httpx.Response:
    """On a connection of its own: a frozen gateway keeps those that are open."""
    return httpx.post(f"{mesh.url}/v1/completions", json=BODY, timeout=60)


@contextmanager
def frozen(processes: list[psutil.Process]) -> Iterator[None]:
    """Stopped inside the block."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def asked_around(mesh: Mesh, pause: Callable[[], None]) -> list[str]:
    """What became of requests before, during and after it that were not answered."""
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(post, mesh) for _ in range(2)]
        pausing = pool.submit(pause)
        until = time.monotonic() + PAUSE_SECONDS + 1.5
        while time.monotonic() < until:
            asked.append(pool.submit(post, mesh))
            time.sleep(0.4)
        pausing.result(60)
        asked += [pool.submit(post, mesh) for _ in range(2)]
        return [reply.text for reply in (each.result(120) for each in asked) if reply.status_code != 200]


@pytest.mark.parametrize(
    "names", [("scheduler",), ("gateway",), ("decode-0",), ("prefill-0",), ()], ids=lambda n: "+".join(n) or "all"
)
def test_requests_are_answered_over_a_pause(mesh: Mesh, names: tuple[str, ...]) -> None:
    wait_until("the mesh is ready", mesh.is_ready, 60)
    processes = [mesh.child(name) for name in names] or mesh.process.children(recursive=True)

    def pause() -> None:
        with frozen(processes):
            time.sleep(PAUSE_SECONDS)

    assert asked_around(mesh, pause) == []


@pytest.mark.parametrize("names", [("scheduler",), ("decode-0",), ("prefill-0", "decode-0")], ids=lambda n: "+".join(n))
def test_requests_are_answered_over_a_restart(mesh: Mesh, names: tuple[str, ...]) -> None:
    wait_until("the mesh is ready", mesh.is_ready, 60)

    def restart() -> None:
        for name in names:
            mesh.kill(name)

    assert asked_around(mesh, restart) == []
    wait_until("the mesh is ready again", mesh.is_ready, 60)
