"""`weft doctor` where a file is there and cannot be read."""

from __future__ import annotations

import shutil
from pathlib import Path

from weft.cli.doctor.finding import Level, Subject
from weft.cli.doctor.model import check_model

SHIPPED = Path(__file__).parents[3] / "models" / "weft-nano"


def test_settings_that_cannot_be_read_are_told_once_and_end_nothing(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED, broken := tmp_path / "broken")
    (broken / "chat_template.jinja").unlink()
    (broken / "tokenizer_config.json").unlink()
    (broken / "tokenizer_config.json").symlink_to("/proc/self/mem")  # as of a disk that fails, for root too
    bad = [each for each in check_model(Subject({"broken": broken})) if each.level is not Level.OK]
    assert [each.check for each in bad] == ["settings"]
    assert "Input/output error" in bad[0].says
