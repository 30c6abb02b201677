"""Extracts the commands that README and docs show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("models/*/README.md")])
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.M | re.S)
SPAN = re.compile(r"`([^`]+)`")
SHELL_END = {"|", "&&", ";", ">", "#", "\\"}


def commands(page: Path) -> Iterator[list[str]]:
    """The commands of a page as words: lines of its code blocks, and code spans in its text."""
    text = page.read_text()
    typed = [line for block in FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    spans = [span.replace("\n", " ") for span in SPAN.findall(FENCE.sub("", text))]
    for line in (*typed, *spans):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # prose between two backticks, or Python
            continue
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        if words:
            yield words


def until_shell(words: list[str]) -> list[str]:
    """The words of one command, up to a pipe, a redirection, a comment or the end of the line."""
    end = next((i for i, word in enumerate(words) if word in SHELL_END), len(words))
    return words[:end]


def named(program: str) -> list[tuple[str, list[str]]]:
    """Every use of a program: its page, and the words that follow the program's name."""
    return [
        (str(page.relative_to(ROOT)), until_shell(words[1:]))
        for page in PAGES
        for words in commands(page)
        if words[0].removeprefix(".venv/bin/") == program and len(words) > 1
    ]


def distinct(program: str, *subcommands: str) -> list[list[str]]:
    """Distinct uses of a program that start with one of these words, in the order of the pages."""
    found = [tuple(words) for _, words in named(program) if words[0] in subcommands]
    return [list(words) for words in dict.fromkeys(found)]
