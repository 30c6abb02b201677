"""How a store's process behaves on cores that others want."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weft.kv import parent_death

AUTOGROUP = Path("/proc/self/autogroup")
# a worker in a nice session starts a child that leads a session of its own, as store clients do
WORKER = """
import subprocess, sys
from pathlib import Path
from weft.kv.parent_death import inherit_autogroup
Path("/proc/self/autogroup").write_text("7")
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
before = Path(f"/proc/{child.pid}/autogroup").read_text()
inherit_autogroup(child.pid)
print(before.split()[-1], Path(f"/proc/{child.pid}/autogroup").read_text().split()[-1])
child.kill()
"""


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not deal out cores by session")
def test_a_store_client_is_as_nice_as_its_worker() -> None:
    command = [sys.executable, "-c", WORKER]
    assert subprocess.check_output(command, text=True, start_new_session=True, timeout=60).split() == ["0", "7"]


def test_a_process_that_has_ended_is_no_error() -> None:
    code = "from weft.kv.parent_death import inherit_autogroup as c; c(2**22 - 1)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("text", ["", "\n"])
def test_a_process_of_no_session_starts_its_children_all_the_same(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = tmp_path / "autogroup"
    ours.write_text(text)
    monkeypatch.setattr(parent_death, "OUR_SESSION", ours)
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        parent_death.inherit_autogroup(child.pid)
    finally:
        child.kill()
        child.wait()
