"""Prose and names: plain subjects in product code and docs, short pages, one name for one concept."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = [
    path
    for folder in ("bundle", "services", "libs", "kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "__pycache__" not in path.parts
]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "results" not in path.parts)]

# A sentence that starts with one of these does not name what acts.
VAGUE_WORDS = (
    "who|whom|whose|whoever|whomever|whatever|nobody|somebody|everybody|anybody|anew|of late|had better"
    "|is told|are told|was told"
)
VAGUE = re.compile(rf"\b({VAGUE_WORDS})\b", re.IGNORECASE)
MAX_PAGE_LINES = 250
# Class names that several modules may define, with the reason.
SHARED_NAMES = {"Config": "each service has the settings of its own process"}


def _vague_lines(path: Path, text: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for number, line in enumerate(text.split("\n"), 1)
        if VAGUE.search(line)
    ]


@pytest.mark.parametrize("line", ["# whoever calls this", "the worker is told", "Nobody waits"])
def test_vague_subject_is_found(line: str) -> None:
    assert _vague_lines(ROOT / "README.md", line)


def test_product_code_names_its_subjects() -> None:
    assert [line for path in PRODUCT for line in _vague_lines(path, path.read_text())] == []


def test_pages_name_their_subjects() -> None:
    def prose(text: str) -> str:
        blocks = re.sub(r"```.*?```", lambda block: "\n" * block.group().count("\n"), text, flags=re.DOTALL)
        return re.sub(r"`[^`\n]*`", "", blocks)

    assert [line for page in PAGES for line in _vague_lines(page, prose(page.read_text()))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_is_short(page: Path) -> None:
    assert page.read_text().count("\n") <= MAX_PAGE_LINES, f"{page.name}: split it by the questions that it answers"


def test_class_name_stands_for_one_thing() -> None:
    modules = defaultdict(set)
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].add(str(path.relative_to(ROOT)))
    shared = {name: sorted(where) for name, where in modules.items() if len(where) > 1 and name not in SHARED_NAMES}
    assert shared == {}
