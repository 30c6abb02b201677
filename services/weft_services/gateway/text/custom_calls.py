"""Converts calls of custom tools: the model writes JSON arguments, the client gets the one text in them.

Works on the stream; text that may still turn out to be other JSON is held back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from weft_services.gateway.text.parts import CALLS, Part, PartKind

# the only argument of the function
INPUT = "input"
_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_HEAD = f'{{"{INPUT}":"'
# Characters and complete escapes; a high surrogate must wait for the next escape.
_WHOLE = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[0-9a-fA-F]{4}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u])))*'
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_LETTERS = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}


class CustomCalls:
    """Rewrites the parts of one answer: calls of `names` become CUSTOM and INPUT parts."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._open: Part | None = None
        self._reader = _InputReader()

    def read(self, parts: Sequence[Part], is_end: bool) -> list[Part]:
        """Return the rewritten parts. `is_end`: no more parts follow."""
        out: list[Part] = []
        for part in parts:
            if part.kind is PartKind.ARGUMENTS and self._open is not None:
                self._grow(out, self._reader.push(part.text))
                continue
            self._close(out)
            if part.kind in CALLS and part.text in self._names:
                part = Part(PartKind.CUSTOM, part.text, part.call, part.call_id)
                self._open, self._reader = part, _InputReader()
            out.append(part)
        if is_end:
            self._close(out)
        return out

    def _grow(self, out: list[Part], text: str) -> None:
        if text and self._open is not None:
            out.append(Part(PartKind.INPUT, text, self._open.call))

    def _close(self, out: list[Part]) -> None:
        if self._open is not None:
            self._grow(out, self._reader.finish())
            self._open = None


class _InputReader:
    """Extracts the text from the arguments of one call."""

    def __init__(self) -> None:
        self._held = ""
        self._is_begun = self._is_ended = False

    def push(self, text: str) -> str:
        """Return the input text that is certain so far."""
        if self._is_ended:
            return ""
        self._held += text
        if not self._is_begun:
            begun = _BEGIN.match(self._held)
            if begun is None:
                return ""
            self._is_begun, self._held = True, self._held[begun.end() :]
        whole = _WHOLE.match(self._held)
        end = whole.end() if whole else 0
        read, self._held = self._held[:end], self._held[end:]
        self._is_ended = self._held.startswith('"')
        return _decoded(read)

    def finish(self) -> str:
        """Return the rest. Arguments of another form are the input verbatim, unless a single text is all they hold."""
        if self._is_begun:
            return ""
        if _HEAD.startswith("".join(self._held.split())):
            return ""  # cut off before the input began
        try:
            value = json.loads(self._held, strict=False)
        except (ValueError, RecursionError):
            return self._held
        texts = [value] if isinstance(value, str) else list(value.values()) if isinstance(value, dict) else []
        if isinstance(value, dict) and INPUT in value:
            texts = [value[INPUT]]
        is_text = len(texts) == 1 and isinstance(texts[0], str)
        return texts[0] if is_text else "" if value == {} else self._held


def _decoded(text: str) -> str:
    """Decode JSON escapes. Unknown ones stay, because models write regexes."""
    units = _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else _LETTERS.get(found[2], found[0]), text)
    return units.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
