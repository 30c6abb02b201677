"""JSON files of others: read as people write them, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.errors import BadCheckpoint
from weft.file_io import MAX_DEPTH, read_json_object


def test_a_mark_at_the_beginning_is_no_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"a": 1}', encoding="utf-8-sig")
    assert read_json_object(file) == {"a": 1}


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "1", "\ud800", '{"a": ' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1)]
)
def test_what_is_no_object_is_refused_by_file(tmp_path: Path, content: str) -> None:
    file = tmp_path / "settings.json"
    file.write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(BadCheckpoint, match=r"settings\.json"):
        read_json_object(file)
