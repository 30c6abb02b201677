r"""Repairs the JSON that models write, character by character, so that the arguments of calls always parse.

Valid JSON passes unchanged. In strings, control characters are escaped, a backslash that starts no JSON escape (`\d`,
`C:\work`) is doubled, and an unpaired surrogate becomes U+FFFD. Python's and JavaScript's literals, quotes and numbers
become JSON's; NaN and the infinities become null. Extra commas are dropped; missing commas, colons and brackets are
added. The result does not depend on how the text is cut into pieces.
"""

from __future__ import annotations

import json
import math
import re

SPACE = " \t\r\n"
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
LITERALS = {"True": "true", "False": "false", **dict.fromkeys(("None", "undefined", "NaN", "Infinity"), "null")}
LITERALS |= dict.fromkeys(("true", "false", "null"), "") | dict.fromkeys(("-NaN", "-Infinity", "+Infinity"), "null")
# Characters of a string that need no change, by the quote that ends it.
PLAIN = {quote: re.compile(rf"[^{quote}\"\\\x00-\x1f]+") for quote in "\"'"}
WORD = re.compile(r"""[^\s,:{}\[\]"'<`]+""")
HALF_PAIR = "\\ufffd"
ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")


class JsonRepairer:
    """Repair state of one value.

    `is_done`: the value has ended. `is_guessed`: the repairs went beyond strings, literals and commas.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.is_guessed = False
        self._closers: list[str] = []  # closing brackets of the open containers
        self._expects = "value"  # or "key", "colon", "more" (a comma or the container's end)
        self._comma = ""  # a pending comma and the white space after it
        self._quote = ""  # quote of the open string
        self._word: list[str] = []
        self._escape = ""  # beginning of an incomplete escape
        self._out: list[str] = []

    def read(self, text: str) -> tuple[str, int]:
        """Return the output, and how much of the text was read: all of it, unless the value ends earlier."""
        # fast path for most tokens of long strings
        if self._quote and not self._escape and PLAIN[self._quote].fullmatch(text):
            return text, len(text)
        num_held = len(self._escape)
        text, self._escape = self._escape + text, ""
        at = self._read(text, is_over=False)
        return self._taken(), at + len(self._escape) - num_held

    def close(self) -> str:
        """Close open strings and containers at the end of the answer, and return the rest."""
        held, self._escape = self._escape, ""
        self._read(held, is_over=True)
        if self._quote:
            self._end_string()
        self._end_word()
        self._close_all()
        return self._taken()

    def _taken(self) -> str:
        text = "".join(self._out)
        self._out.clear()
        return text

    def _read(self, text: str, is_over: bool) -> int:
        at = 0
        while at < len(text) and not self.is_done:
            step = self._in_string(text, at, is_over) if self._quote else self._between(text, at)
            if not step:
                break
            at += step
        return at

    def _in_string(self, text: str, at: int, is_over: bool) -> int:
        if plain := PLAIN[self._quote].match(text, at):
            self._out.append(plain[0])
            return len(plain[0])
        letter = text[at]
        if letter == "\\":
            return self._escaped(text, at, is_over)
        if letter == self._quote:
            self._end_string()
        else:
            self._out.append(json.dumps(letter)[1:-1])
        return 1

    def _escaped(self, text: str, at: int, is_over: bool) -> int:
        """Read one escape. Return 0 and hold it if it is incomplete."""
        chunk = text[at : at + 12]
        if not is_over and _may_go_on(chunk):
            self._escape = chunk
            return 0
        if chunk[1:2] == "'":
            self._out.append("'")
            return 2
        if chunk[1:2] and chunk[1] in '"\\/bfnrt':
            self._out.append(chunk[:2])
            return 2
        if found := ESCAPE.match(chunk):
            is_pair = _is_high(found[1]) and (low := ESCAPE.match(chunk, 6)) is not None and _is_low(low[1])
            is_half = not is_pair and (_is_high(found[1]) or _is_low(found[1]))
            self._out.append(HALF_PAIR if is_half else chunk[: 12 if is_pair else 6])
            return 12 if is_pair else 6
        self._out.append("\\\\")
        return 1

    def _between(self, text: str, at: int) -> int:
        """Read a word or a character outside of strings. Return 0 if the value has ended."""
        if found := WORD.match(text, at):
            self._word.append(found[0])
            return len(found[0])
        letter = text[at]
        self._end_word()
        if self.is_done or (not self._closers and letter in ",:}]" + SPACE):
            self.is_done = True
            return 0
        if letter in "<`":  # Markup follows, so the value has no end of its own.
            self._close_all()
            return 0
        self._punctuation(letter)
        return 1

    def _punctuation(self, letter: str) -> None:
        if letter in "\"'":
            self._begin()
            self._out.append('"')
            self._quote = letter
        elif letter in "{[":
            self._open(letter)
        elif letter in "}]":
            self._close(letter)
        elif letter == ",":
            self._fill()
            if self._expects == "more":
                self._comma = self._comma or ","
        elif letter == ":":
            if self._expects == "colon":
                self._out.append(":")
                self._expects = "value"
        elif self._comma:
            self._comma += letter if letter in SPACE else ""
        elif letter in SPACE:
            self._out.append(letter)

    def _begin(self) -> bool:
        """Write what must precede a key or a value. Return True for a key."""
        if self._expects == "more":
            self.is_guessed |= not self._comma
            self._out.append(self._comma or ", ")
            self._comma = ""
            self._expects = "key" if self._closers[-1] == "}" else "value"
        elif self._expects == "colon":
            self.is_guessed = True
            self._out.append(": ")
            self._expects = "value"
        return self._expects == "key"

    def _end(self) -> None:
        """Update the state after a key or a value."""
        self._expects = "colon" if self._expects == "key" else "more"
        self.is_done = not self._closers

    def _end_string(self) -> None:
        self._out.append('"')
        self._quote = ""
        self._end()

    def _end_word(self) -> None:
        if self._word:
            word = "".join(self._word)
            self._word.clear()
            self._out.append(json.dumps(word, ensure_ascii=False) if self._begin() else _as_json(word))
            self._end()

    def _open(self, letter: str) -> None:
        if self._begin():
            self.is_guessed = True
            self._out.append('"": ')
        self._out.append(letter)
        self._closers.append("}" if letter == "{" else "]")
        self._expects = "key" if letter == "{" else "value"

    def _close(self, letter: str) -> None:
        """Close the innermost container of this kind and those inside it."""
        self.is_guessed |= letter != self._closers[-1]
        if letter not in self._closers:
            return
        while self._close_one() != letter:
            pass

    def _close_one(self) -> str:
        self._fill()
        self._out.append(self._comma[1:])  # the white space
        self._comma = ""
        self._out.append(self._closers[-1])
        closer = self._closers.pop()
        self._expects = "value"
        self._end()
        return closer

    def _fill(self) -> None:
        """Give null to a key without a value."""
        if self._closers[-1] == "}" and self._expects in ("colon", "value"):
            self.is_guessed = True
            self._out.append(": null" if self._expects == "colon" else "null")
            self._expects = "more"

    def _close_all(self) -> None:
        self.is_guessed |= bool(self._closers)
        while self._closers:
            self._close_one()
        self.is_done = True


def repaired_object(text: str) -> str | None:
    """Return the object that `text` consists of, repaired; None if the repair would be a guess."""
    mender = JsonRepairer()
    text = text.strip()
    if not text.startswith("{"):
        return None
    mended, num_read = mender.read(text)
    return mended if mender.is_done and not mender.is_guessed and num_read == len(text) else None


def _may_go_on(chunk: str) -> bool:
    """True if the next characters may change the meaning of this escape."""
    if len(chunk) < 2:
        return True
    if chunk[1] != "u":
        return False
    if len(chunk) < 6:
        return all(letter in "0123456789abcdefABCDEF" for letter in chunk[2:])
    if not (found := ESCAPE.match(chunk)) or not _is_high(found[1]) or len(chunk) == 12:
        return False
    return ESCAPE.fullmatch(chunk[6:] + "\\uDC00"[len(chunk) - 6 :]) is not None


def _is_high(digits: str) -> bool:
    return 0xD800 <= int(digits, 16) < 0xDC00


def _is_low(digits: str) -> bool:
    return 0xDC00 <= int(digits, 16) < 0xE000


def _as_json(word: str) -> str:
    """Convert a value without quotes."""
    if word in LITERALS:
        return LITERALS[word] or word
    try:
        if NUMBER.fullmatch(word) and (word.lstrip("-").isdigit() or math.isfinite(float(word))):
            return word
        number = float(word)
        if not math.isfinite(number):
            return "null"
        digits = word.lstrip("+-")
        return str(int(word)) if digits.isascii() and digits.isdigit() else json.dumps(number)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
