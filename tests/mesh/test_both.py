"""Workers that hold both roles, and no others: the tokens are the same, and no block is lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.mesh.conftest import Mesh
from tests.mesh.oracle import greedy, prompts
from tests.mesh.test_tokens import complete
from weft_mesh.v1 import common_pb2

pytestmark = pytest.mark.timeout(300)
NUM_TOKENS = 12


def test_tokens_are_exact_alone_and_side_by_side() -> None:
    running = Mesh("--both", "2", "--transport", "mooncake")
    asked = prompts(10, 20, 600, salt=9)
    expected = [greedy(prompt, NUM_TOKENS) for prompt in asked]
    try:
        running.wait_ready()
        assert {worker.hello.role for worker in running.workers().values()} == {common_pb2.WORKER_ROLE_BOTH}
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(lambda prompt: complete(running, prompt), asked))
        assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
        used = [
            name for name in running.workers() if running.metric(name, "weft_engine_tokens_total", kind="generated")
        ]
        assert len(used) == 2
        running.wait_idle()
    finally:
        running.stop()
