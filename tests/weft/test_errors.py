"""The tree of errors, as its module draws it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from weft import errors


def test_the_tree_is_drawn_with_all_its_leaves() -> None:
    drawn = re.findall(r"^( *)([A-Z]\w+)(?:  |$)", errors.__doc__ or "", re.M)
    assert sorted(drawn) == sorted(tree(errors.WeftError))


def tree(top: type[errors.WeftError], depth: int = 0) -> Iterator[tuple[str, str]]:
    yield "  " * depth, top.__name__
    for each in top.__subclasses__():
        if each.__module__ == errors.__name__:
            yield from tree(each, depth + 1)
