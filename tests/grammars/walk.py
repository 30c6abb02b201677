"""Answers that a grammar allows, drawn at random and without a model: short ones, as they end where they may."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy
from tokenizers import Tokenizer

from weft.grammar import GrammarConstraint

MAX_STEPS = 3000
CLOSING = ('"', "}", "]", '"}', ":", "n", "nu", "null")


class Walk:
    """Draws answers as text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int], seed: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = frozenset(ends)
        self._random = Random(seed)
        found = (tokenizer.token_to_id(text) for text in CLOSING)
        self._closing = frozenset(token for token in found if token is not None)

    def answer(self, constraint: GrammarConstraint) -> str:
        """One that comes to its end."""
        words = numpy.zeros((self._vocab_size + 31) // 32, dtype=numpy.int32)
        tokens: list[int] = []
        for _ in range(MAX_STEPS):
            constraint.fill(words)
            bits = numpy.unpackbits(words.view(numpy.uint8), bitorder="little")[: self._vocab_size]
            allowed = set(numpy.flatnonzero(bits).tolist())
            if allowed & self._ends or not allowed:
                return str(self._tokenizer.decode(tokens))
            closing = sorted(allowed & self._closing)
            choices = closing if closing and self._random.random() < 0.8 else sorted(allowed)
            tokens.append(self._random.choice(choices))
            constraint.accept(tokens[-1:])
        raise AssertionError("the answer did not come to its end")
