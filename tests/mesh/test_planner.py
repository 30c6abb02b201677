"""The planner on a running mesh: prompts wait, a decode worker comes over, and tokens stay what transformers says."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from tests.mesh.conftest import Mesh, wait_until
from tests.mesh.oracle import prompts
from tests.mesh.test_roles import roles
from tests.mesh.test_tokens import assert_exact

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def planned() -> Iterator[Mesh]:
    """A mesh on which the shortest queue is too long and no token too slow."""
    environment = {"WEFT_ROLE_BALANCER": "1/60000", "WEFT_CHUNK_TOKENS": "16"}
    running = Mesh("--prefill", "1", "--decode", "2", "--transport", "grpc", environment=environment)
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


def playing(mesh: Mesh) -> list[str]:
    return sorted(str(role) for role in roles(mesh).values())


def test_a_decode_worker_comes_over_while_prompts_wait_and_the_last_one_stays(planned: Mesh) -> None:
    mesh, has_moved = planned, Event()

    def press(index: int) -> None:
        for turn in range(500):
            if has_moved.is_set():
                return
            (prompt,) = prompts(1, 300, 300, salt=500 + turn)
            body = {"model": "weft-nano", "prompt": [prompt[0], 1000 + index, *prompt[2:]], "max_tokens": 1}
            mesh.client.post("/v1/completions", json=body).raise_for_status()

    with ThreadPoolExecutor(8) as pool:
        pressing = [pool.submit(press, index) for index in range(8)]
        try:
            wait_until("a worker plays prefill besides", lambda: playing(mesh).count("prefill") == 2, 60)
        finally:
            has_moved.set()
        for each in pressing:
            each.result(30)
    assert playing(mesh) == ["decode", "prefill", "prefill"]
    assert_exact(mesh, prompts(4, 20, 200, salt=31))
    mesh.wait_idle()
