"""Who goes first, as clients say it: vLLM's number in the body or a header, or a class by name in another header.

Lower is sooner here, as vLLM's clients count; the mesh counts the other way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from weft.errors import InvalidRequest

MAX_PRIORITY = 10
NUMBER_HEADER = "x-vllm-priority"
CLASS_HEADER = "x-smg-priority"
CLASSES = {"interactive": -1, "default": 0, "batch": 1, "bulk": 1}
_NUMBER = re.compile(r"\s*[+-]?[0-9]{1,3}\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Urgency:
    """What the headers say: a number, if there is one, and what the named class is worth."""

    number: int | None = None
    by_class: int = 0

    def level(self, own: int | None) -> int:
        """A number in the header goes before the request's own, as in vLLM; a class counts where there is no number."""
        if self.number is not None:
            return self.number
        return self.by_class if own is None else own


UNSAID = Urgency()


def urgency_of(headers: Mapping[str, str]) -> Urgency:
    """A class that nobody knows is the usual one, as in the router that the header comes from.

    Raises InvalidRequest for a number that is none.
    """
    by_class = CLASSES.get(headers.get(CLASS_HEADER, "").strip().lower(), 0)
    number = headers.get(NUMBER_HEADER)
    if number is None:
        return Urgency(None, by_class)
    if not _NUMBER.fullmatch(number) or abs(int(number)) > MAX_PRIORITY:
        message = f"{NUMBER_HEADER}: expected an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        raise InvalidRequest(message, NUMBER_HEADER, "invalid_value")
    return Urgency(int(number), by_class)
