"""For whom a file is that is made of another one."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from weft.file_io import copy_ownership


def of_others(path: Path, mode: int) -> Any:
    """A file there that has another owner and group."""
    about = path.stat()
    theirs = os.stat_result((mode, *about[1:4], about.st_uid + 1, about.st_gid + 1, *about[6:]))
    return SimpleNamespace(stat=lambda: theirs)


@pytest.mark.parametrize(("mode", "kept"), [(0o640, 0o600), (0o644, 0o644), (0o750, 0o700), (0o604, 0o644)])
def test_a_group_that_is_another_may_do_no_more_than_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, kept: int
) -> None:
    def refuse(path: Path, user: int, group: int) -> NoReturn:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chown", refuse)
    (made := tmp_path / "made").write_text("")
    copy_ownership(of_others(made, mode), made)
    assert stat.S_IMODE(made.stat().st_mode) == kept


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_root_gives_it_to_whose_the_other_is(tmp_path: Path) -> None:
    (made := tmp_path / "made").write_text("")
    copy_ownership(wanted := of_others(made, 0o640), made)
    assert made.stat()[0] & 0o777 == 0o640
    assert made.stat()[4:6] == wanted.stat()[4:6]
