"""A live mesh gets a worker that nobody planned for, and loses it again; every token stays what transformers says."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.mesh.conftest import START_SECONDS, Mesh, wait_until
from tests.mesh.oracle import prompts
from tests.mesh.test_tokens import assert_exact

pytestmark = pytest.mark.timeout(300)
NEW = "decode-9"


def is_ready(mesh: Mesh) -> bool:
    status = mesh.workers().get(NEW)
    return status is not None and status.report.ready


def test_a_worker_with_a_new_name_joins_computes_and_leaves(mesh: Mesh) -> None:
    own = {"WEFT_WORKER_ID": NEW, "WEFT_ROLE": "decode", "WEFT_PORT": "0", "WEFT_METRICS_PORT": "0"}
    environ = {**mesh.child("gateway").environ(), **own}
    process = subprocess.Popen([sys.executable, "-m", "weft_services.worker"], env=environ)
    try:
        wait_until(f"{NEW} is ready", lambda: is_ready(mesh), START_SECONDS)
        assert_exact(mesh, prompts(6, 20, 100, salt=31))
        assert mesh.metric(NEW, "weft_engine_tokens_total", kind="generated") > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_SECONDS) == 0
        wait_until(f"{NEW} has left", lambda: NEW not in mesh.workers())
        assert_exact(mesh, prompts(2, 20, 100, salt=32))
    finally:
        process.kill()
        process.wait()
    mesh.wait_idle()
