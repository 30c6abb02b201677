"""Grammars that answers must match, compiled by llguidance for one tokenizer, under limits. Knows no request, no torch.

The gateway compiles to refuse what cannot be served; workers compile to mask tokens. Both by the same limits.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from weft.errors import BadCheckpoint, InvalidRequest
from weft.tokenizer import read_tokenizer

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_CACHED = 64
# About 10 ms of work a step and 30 a compilation at most; a step of an honest grammar takes well under one.
LIMITS = LLParserLimits(
    initial_lexer_fuel=60_000,
    step_lexer_fuel=150_000,
    step_max_items=30_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class UnusableGrammar(InvalidRequest):
    """What the compiler refuses. `told`: in its own words, which may take several lines."""

    def __init__(self, told: str) -> None:
        super().__init__(f"the grammar cannot be used: {_summary(told)}", "grammar")
        self.told = told


class Grammars:
    """Compiled grammars of one tokenizer, the last few kept. May be used from several threads."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Raises BadCheckpoint for a tokenizer that llguidance cannot read."""
        self.tokenizer_hash = hash_tokenizer(tokenizer_json)
        try:
            self._tokenizer = LLTokenizer(tokenizer_json.decode(), vocab_size, list(eos_token_ids) or None)
        except (ValueError, UnicodeDecodeError) as error:
            raise BadCheckpoint(f"tokenizer.json: {error}") from error
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, text: str) -> GrammarConstraint:
        """A constraint at its beginning. Raises InvalidRequest saying what is wrong, UnusableGrammar for the compiler's
        complaints."""
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
        return GrammarConstraint(known.deep_copy())

    def _compile(self, text: str) -> LLMatcher:
        if len(text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(f"the grammar is longer than {MAX_GRAMMAR_CHARS} characters", "grammar")
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        tried = matcher.deep_copy()
        if not tried.is_error():
            tried.compute_bitmask()  # the first mask shows what only the lexer can tell
        if tried.is_error():
            raise UnusableGrammar(tried.get_error())
        return matcher


class GrammarConstraint:
    """One sequence's place in its grammar: a `weft.engine.token_history.Constraint`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def accept(self, token_ids: Sequence[int]) -> None:
        """Tokens that were generated, in order."""
        self._matcher.consume_tokens(list(token_ids))

    def fill(self, words: Any) -> None:
        """`words`: a contiguous array of int32, as many as the vocabulary needs."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    @property
    def failure(self) -> str | None:
        """The grammar became too complex, or a token did not fit."""
        if not self._matcher.is_error():
            return None
        return f"the answer's grammar cannot be followed any further: {first_line(self._matcher.get_error())}"


def hash_tokenizer(tokenizer_json: bytes) -> str:
    """BLAKE2b, hex: equal for workers and gateways that read the same tokenizer.json."""
    return hashlib.blake2b(tokenizer_json, digest_size=32).hexdigest()


def load_grammars(directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Grammars:
    """For the tokenizer of a checkpoint. Raises BadCheckpoint."""
    return Grammars(read_tokenizer(directory), vocab_size, eos_token_ids)


def _summary(told: str) -> str:
    """The first line, and what is wrong with a regex, which comes last. What llguidance has no words for is a grammar,
    such as a schema that refers to itself, without any answer."""
    first = first_line(told)
    if first == "NoExtensionBias":
        return "no answer matches it"
    reason = next((line for line in told.splitlines() if line.startswith("error: ")), None)
    return first if reason is None else f"{first} {reason.removeprefix('error: ')}"


def first_line(text: str) -> str:
    """Enough of a message to act on."""
    return text.strip().partition("\n")[0][:300]
