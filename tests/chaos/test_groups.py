"""Groups that lose a rank again and again, in any state; `make chaos` runs these, `make test` a few in tests/mesh."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import httpx
import psutil
import pytest

from tests.mesh.conftest import Mesh, is_alive, wait_until
from tests.mesh.oracle import greedy, prompts
from tests.mesh.test_groups import lose_rank, rank_of
from tests.mesh.test_roles import change
from tests.mesh.test_sleep import weft
from tests.mesh.test_tokens import assert_exact

pytestmark = pytest.mark.timeout(4 * 3600)
RANKS = ("decode-0", "decode-0.1", "prefill-0", "prefill-0.1")
NUM_KILLS = 50  # a round


@pytest.fixture(scope="module")
def groups() -> Iterator[Mesh]:
    """Time to start again even on a busy machine."""
    settings = {"WEFT_CHUNK_TOKENS": "16", "WEFT_MAX_QUEUE_WAIT_SECONDS": "4", "WEFT_MIGRATION_TIMEOUT_SECONDS": "120"}
    running = Mesh("--tp", "2", "--transport", "mooncake", environment=settings)
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


def is_gone(process: psutil.Process) -> bool:
    return not is_alive(process)


def answer(mesh: Mesh, prompt: list[int]) -> list[int]:
    body = {"model": "weft-nano", "prompt": prompt, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    reply = mesh.client.post("/v1/completions", json=body | {"return_token_ids": True}, timeout=httpx.Timeout(120))
    assert reply.status_code == 200, reply.text
    tokens: list[int] = reply.json()["choices"][0]["token_ids"]
    return tokens


def test_answers_are_whole_whichever_rank_is_killed(groups: Mesh, group_round: int) -> None:
    """Four clients ask all the time. A stream may move once, so the next kill waits until the worker is back."""
    source, seconds = random.Random(group_round), []
    asked = prompts(24, 20, 180, salt=100 + group_round)
    expected = [greedy(prompt, 60) for prompt in asked]
    with ThreadPoolExecutor(4) as clients:
        for kill in range(NUM_KILLS):
            chosen = [source.randrange(len(asked)) for _ in range(4)]
            answers: list[Future[list[int]]] = [clients.submit(answer, groups, asked[each]) for each in chosen]
            time.sleep(source.random() * 0.5)
            name, boots = source.choice(RANKS), groups.boots()
            killed, began = groups.child(name), time.monotonic()
            killed.kill()
            found = [each.result(120) for each in answers]
            assert found == [expected[each] for each in chosen], f"kill {kill} of {name}"
            groups.wait_for_return(boots, name.split(".")[0])
            seconds.append(time.monotonic() - began)
            wait_until("the killed rank is gone", partial(is_gone, killed))
    groups.wait_idle()
    left = [each for each in psutil.process_iter(["cmdline"]) if "weft.worker.follower" in (each.info["cmdline"] or [])]
    ours = {each.pid for each in groups.process.children(recursive=True)}
    assert len([each for each in left if each.pid in ours]) == 2
    print(f"ready again after {sorted(seconds)[len(seconds) // 2]:.1f} s, at most {max(seconds):.1f} s")


def test_a_rank_that_freezes_is_lost(groups: Mesh, group_round: int) -> None:
    seconds = lose_rank(groups, signal.SIGSTOP, "gave no sign of life for 5 s", salt=200 + group_round)
    print(f"ready again after {seconds:.1f} s")
    groups.wait_idle()


def test_a_sleeping_group_has_one_process(groups: Mesh, group_round: int) -> None:
    boots, rank = groups.boots(), rank_of(groups)
    change(groups, "prefill-0", "both")  # the last decode worker does not sleep
    weft(groups, "sleep", "decode-0")
    wait_until("it is asleep", lambda: any(each.report.asleep for each in groups.workers().values()))
    wait_until("its rank is gone", lambda: not is_alive(rank))
    weft(groups, "wake", "decode-0")
    groups.wait_for_return(boots, "decode-0")
    assert is_alive(rank_of(groups))
    change(groups, "prefill-0", "prefill")
    assert_exact(groups, prompts(2, 60, 100, salt=220 + group_round))
