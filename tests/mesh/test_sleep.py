"""`weft sleep` and `weft wake` on a running mesh: the process stays, its memory goes, and nobody's request is lost."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from tests.mesh.conftest import Mesh, wait_until
from tests.mesh.oracle import greedy, prompts
from tests.mesh.test_roles import change, long_answer
from tests.mesh.test_tokens import assert_exact
from weft.cli.main import app

pytestmark = pytest.mark.timeout(240)


def weft(mesh: Mesh, *words: str) -> str:
    """What a command says of this mesh."""
    address = mesh.child("gateway").environ()["WEFT_SCHEDULER_ADDR"]
    return CliRunner().invoke(app, [*words, "--scheduler", address], env={"COLUMNS": "180"}).output


def mapped(process: psutil.Process, name: str) -> int:
    """Bytes of files of that name in a process' memory."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    places = [line.split()[0].split("-") for line in lines if name in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in places)


def test_a_sleeping_worker_gives_back_its_memory_and_serves_again_when_it_is_woken(mesh: Mesh) -> None:
    boots, sleeping = mesh.boots(), mesh.child("decode-0")
    assert "last decode worker" in weft(mesh, "sleep", "decode-0")
    before = sleeping.memory_info().rss
    assert mapped(sleeping, "/dev/shm/weft-weights-") > 9_000_000 < mapped(sleeping, "weft-kv-pool")
    change(mesh, "prefill-0", "both")
    asked = prompts(3, 60, 60, salt=72)
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [pool.submit(long_answer, mesh, prompt, 160) for prompt in asked]
        wait_until("the mesh has work", lambda: any(each.booked_requests for each in mesh.workers().values()))
        assert "releases its memory" in weft(mesh, "sleep", "decode-0")
        assert [answer.result(120) for answer in answers] == [greedy(prompt, 160) for prompt in asked]
    wait_until("it is asleep", lambda: mesh.workers()["decode-0"].report.asleep)
    wait_until("its memory is gone", lambda: not mapped(sleeping, "weft-weights-") + mapped(sleeping, "weft-kv-pool"))
    wait_until("it has joined again", lambda: "decode-0" in mesh.workers())
    assert sleeping.memory_info().rss < before
    assert [line for line in weft(mesh, "top", "--once").splitlines() if "decode-0" in line and "asleep" in line]
    told = json.loads(weft(mesh, "status", "--json"))["workers"]
    assert {each["worker_id"]: (each["asleep"], each["ready"]) for each in told} == {
        "decode-0": (True, False),
        "prefill-0": (False, True),
    }
    assert_exact(mesh, prompts(1, 60, 100, salt=73))
    assert "loads its model again" in weft(mesh, "wake", "decode-0")
    mesh.wait_for_return(boots, "decode-0")
    assert mesh.child("decode-0").pid == sleeping.pid
    change(mesh, "prefill-0", "prefill")
    assert_exact(mesh, prompts(1, 60, 100, salt=74))
    assert mesh.metric("decode-0", "weft_sequences", state="running") == 0
    mesh.wait_idle()
