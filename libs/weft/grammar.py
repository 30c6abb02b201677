"""Compiles answer grammars with llguidance for one tokenizer, under limits.

The gateway compiles to reject grammars that cannot be served. Workers compile to mask tokens. Both use the same limits.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from weft.errors import BadCheckpoint, InvalidRequest
from weft.tokenizer import read_tokenizer

MAX_GRAMMAR_CHARS = 256 * 1024
# A grammar that drafts has two twins.
MAX_CACHED = 3 * 64
# item and key separators of JSON as models write it
SEPARATORS = ((", ", ": "), (",", ":"))
# At most about 10 ms of work a step and 30 ms a compilation; a step of a normal grammar takes well under 1 ms.
LIMITS = LLParserLimits(
    initial_lexer_fuel=60_000,
    step_lexer_fuel=150_000,
    step_max_items=30_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class UnusableGrammar(InvalidRequest):
    """The compiler rejected the grammar. `details` is its full message, which may have several lines."""

    def __init__(self, details: str) -> None:
        super().__init__(f"the grammar cannot be used: {_summary(details)}", "grammar")
        self.details = details


class Grammars:
    """Compiles grammars for one tokenizer and caches the last MAX_CACHED. Thread-safe."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Raises BadCheckpoint for a tokenizer that llguidance cannot read."""
        self.tokenizer_hash = hash_tokenizer(tokenizer_json)
        try:
            self._tokenizer = LLTokenizer(tokenizer_json.decode(), vocab_size, list(eos_token_ids) or None)
        except (ValueError, UnicodeDecodeError) as error:
            raise BadCheckpoint(f"tokenizer.json: {error}") from error
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, text: str, with_twins: bool = False) -> GrammarConstraint:
        """Return a constraint at its start. With twins, it knows more tokens that are forced.

        Raises InvalidRequest for a grammar that is too long, UnusableGrammar when the compiler rejects it.
        """
        start = self._cached(text)
        return GrammarConstraint(start, self._twins(text) if with_twins else ())

    def _twins(self, text: str) -> list[LLMatcher]:
        twins: list[LLMatcher] = []
        for twin in twin_texts(text):
            try:
                twins.append(self._cached(twin))
            except InvalidRequest:
                continue
        return twins

    def _cached(self, text: str) -> LLMatcher:
        with self._lock:
            known = self._compiled.get(text)
            if known is not None:
                self._compiled.move_to_end(text)
        if known is None:
            known = self._compile(text)
            with self._lock:
                self._compiled[text] = known
                while len(self._compiled) > MAX_CACHED:
                    self._compiled.popitem(last=False)
        return known

    def _compile(self, text: str) -> LLMatcher:
        if len(text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(f"the grammar is longer than {MAX_GRAMMAR_CHARS} characters", "grammar")
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        tried = matcher.deep_copy()
        if not tried.is_error():
            tried.compute_bitmask()  # Only the first mask reveals errors of the lexer.
        if tried.is_error():
            raise UnusableGrammar(tried.get_error())
        return matcher


class GrammarConstraint:
    """The position of one sequence in its grammar; implements `weft.engine.messages.Constraint`.

    `start` is a matcher that has consumed nothing; it may be shared and is not changed. `twins` are such matchers of
    narrower grammars, which allow the text that a model probably writes.
    """

    def __init__(self, start: LLMatcher, twins: Sequence[LLMatcher] = ()) -> None:
        self._start = start
        self._matcher = start.deep_copy()
        self._accepted: list[int] = []
        self._forced = _ForcedTokens(twins, start)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advance by generated tokens, in order."""
        self._matcher.consume_tokens(list(token_ids))
        self._accepted += token_ids

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens, and a failure that they or a mask after them caused."""
        del self._accepted[len(self._accepted) - num_tokens :]
        if not self._matcher.is_error():
            self._matcher.rollback(num_tokens)
            return
        # A matcher never leaves its error state, so another one takes its place.
        self._matcher = self._start.deep_copy()
        self._matcher.consume_tokens(self._accepted)

    def valid(self, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens, from the first, could be accepted in order."""
        if self._matcher.is_error():
            return 0
        num_valid: int = self._matcher.validate_tokens(list(token_ids))
        if self._matcher.is_error():  # The look ahead exceeded the limits; plain decoding may never come there.
            self.rollback(0)
            return 0
        return num_valid

    def forced(self) -> list[int]:
        """Return tokens that a twin forces next. The grammar itself may allow others, or refuse them."""
        return self._forced.following(self._accepted)

    def fill(self, words: Any) -> None:
        """Write the token mask to `words`, a contiguous int32 array with one bit a token."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    @property
    def failure(self) -> str | None:
        """Why the grammar cannot continue: it became too complex, or a token did not match."""
        if not self._matcher.is_error():
            return None
        return f"the answer's grammar cannot be followed any further: {first_line(self._matcher.get_error())}"


class _ForcedTokens:
    """Follows the twins of a grammar while they allow the text, and the grammar itself after that."""

    def __init__(self, twins: Sequence[LLMatcher], start: LLMatcher) -> None:
        self._unused = [twins, (start,)]
        self._matchers: list[LLMatcher] = []
        self._num_followed = 0

    def following(self, accepted: list[int]) -> list[int]:
        """Return the only tokens that can follow all `accepted` ones; empty if there is a choice."""
        while not self._follow(accepted) and self._unused:
            self._matchers = [start.deep_copy() for start in self._unused.pop(0)]
            self._num_followed = 0
        for matcher in self._matchers:
            if token_ids := matcher.compute_ff_tokens():
                return list(token_ids)
        return []

    def _follow(self, accepted: list[int]) -> bool:
        added = accepted[self._num_followed :]
        if added:
            self._matchers = [matcher for matcher in self._matchers if matcher.consume_tokens(added)]
        self._num_followed = len(accepted)
        return bool(self._matchers)


def twin_texts(text: str) -> list[str]:
    """Return a grammar with each of SEPARATORS instead of free white space in JSON. Empty for one without JSON."""
    try:
        parts = json.loads(text)["grammars"]
        schemas = [part["json_schema"] for part in parts if "json_schema" in part]
        options = [dict(schema.get("x-guidance", {})) for schema in schemas]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []  # Lark, or not in the gateway's form
    texts: list[str] = []
    for item, key in SEPARATORS if schemas else ():
        for schema, kept in zip(schemas, options, strict=True):
            fixed = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
            schema["x-guidance"] = {"lenient": kept.get("lenient", False)} | fixed
        texts.append(json.dumps({"grammars": parts}))
    return texts


def hash_tokenizer(tokenizer_json: bytes) -> str:
    """Return the BLAKE2b of tokenizer.json in hex; equal for workers and gateways that read the same file."""
    return hashlib.blake2b(tokenizer_json, digest_size=32).hexdigest()


def load_grammars(directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Grammars:
    """Return the compiler for a checkpoint's tokenizer. Raises BadCheckpoint."""
    return Grammars(read_tokenizer(directory), vocab_size, eos_token_ids)


def _summary(details: str) -> str:
    """Return the first line and the regex error, which comes last.

    llguidance reports "NoExtensionBias" for a grammar that no text matches, such as a schema that refers to itself.
    """
    first = first_line(details)
    if first == "NoExtensionBias":
        return "no answer matches it"
    reason = next((line for line in details.splitlines() if line.startswith("error: ")), None)
    return first if reason is None else f"{first} {reason.removeprefix('error: ')}"


def first_line(text: str) -> str:
    """Return the first line of a message, cut at 300 characters."""
    return text.strip().partition("\n")[0][:300]
