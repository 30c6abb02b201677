"""Converts text to token ids and back, with one model's tokenizer."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from tokenizers import Tokenizer, decoders

from weft.tokenizer import byte_letters
from weft_services.gateway.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    FallbackDetokenizer,
    WindowDetokenizer,
)
from weft_services.gateway.text.segmented_encoder import SegmentedEncoder, message_marks

# Each text is tokenized in the calling thread. Waking one of the library's threads takes 5% of a short request's time.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
FEW_IDS = 1024


class Codec:
    """Text <-> token ids.

    Call `encode` in a thread; decoding a few ids takes microseconds.
    """

    def __init__(self, tokenizer: Tokenizer, spoken: frozenset[int] = frozenset()) -> None:
        """`spoken`: special tokens that are part of the answer's text, such as those around tool calls."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._special = special
        self._hidden = special - spoken if special & spoken else None
        self._spells_bytes = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._spelling: dict[int, bytes] = {}  # cache of the tokens seen in answers
        self._texts: dict[int, str] = {}  # cache of the tokens shown in logprobs
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.longest_token_bytes = max(len(token.encode()) for token in vocabulary)
        self._byte_of = {} if self._spells_bytes else self._byte_tokens(vocabulary)

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the ids of a text. `add_special_tokens` includes those the tokenizer adds, such as BOS."""
        # `encode` holds the GIL, for 0.4 s with 160,000 tokens; the batch version releases it.
        (encoding,) = _call(self._tokenizer.encode_batch_fast, [text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def segmented(self, template: str) -> SegmentedEncoder:
        """Return an encoder for the prompts of a chat template."""
        encode = partial(self.encode, add_special_tokens=False)
        return SegmentedEncoder(encode, message_marks(self._tokenizer, template))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens, except the visible ones."""
        if self._hidden is None:
            return str(_call(self._tokenizer.decode, token_ids, skip_special_tokens=True))
        spoken = [token for token in token_ids if token not in self._hidden]
        return str(_call(self._tokenizer.decode, spoken, skip_special_tokens=False))

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """Return a detokenizer for one answer; its pieces join to what `decode` returns.

        `context`: the last tokens before the answer, if the answer continues a text. Vocabularies that are not
        byte-level drop the first space of a text.
        """
        return ByteDetokenizer(self._spell) if self._spells_bytes else self._windowed(self.decode, context)

    def whole_detokenizer(self) -> Detokenizer:
        """Return a detokenizer that shows special tokens, as `whole_text` does."""
        return ByteDetokenizer(self.token_bytes) if self._spells_bytes else self._windowed(self.whole_text)

    def _windowed(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> Detokenizer:
        if self._byte_of:
            return FallbackDetokenizer(decode, self._byte_of, context)
        return WindowDetokenizer(decode, context)

    def _byte_tokens(self, vocabulary: dict[str, int]) -> dict[int, bytes]:
        """Return the tokens that stand for a single byte, if the decoder treats them so."""
        letter = vocabulary.get("<0x41>")
        if letter is None or self._tokenizer.decode([letter]) != "A":
            return {}
        found = {number: _BYTE_PIECE.fullmatch(token) for token, number in vocabulary.items()}
        return {number: bytes.fromhex(byte[1]) for number, byte in found.items() if byte}

    def _spell(self, token_id: int) -> bytes:
        spelled = self._spelling.get(token_id)
        if spelled is None:
            is_silent = token_id in (self._special if self._hidden is None else self._hidden)
            spelled = b"" if is_silent else spell(self._tokenizer.id_to_token(token_id) or "")
            self._spelling[token_id] = spelled
        return spelled

    def is_special(self, token_id: int | None) -> bool:
        """True if the token is special, such as an end or a marker."""
        return token_id in self._special

    def with_visible_tokens(self, spoken: Iterable[int]) -> Codec:
        """Return a codec that shows these special tokens as text."""
        return Codec(self._tokenizer, frozenset(spoken))

    def marks(self, markers: Iterable[str]) -> dict[str, int]:
        """Return the ids of those markers that are single tokens."""
        added = {token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items()}
        return {marker: added[marker] for marker in markers if marker in added}

    def token_text(self, token_id: int) -> str:
        """Return one token as text in the middle of an answer, special ones included; used for logprobs."""
        text = self._texts.get(token_id)
        if text is None:
            text = alone = self.whole_text([token_id])
            # Other vocabularies keep the space before a word in the token, but drop it at the start of a text.
            if not self._spells_bytes:
                text = self.whole_text([token_id, token_id])[len(alone) :]
            self._texts[token_id] = text
        return text

    def whole_text(self, token_ids: Sequence[int]) -> str:
        """Return the text with all special tokens."""
        if len(token_ids) <= FEW_IDS:
            return str(_call(self._tokenizer.decode, token_ids, skip_special_tokens=False))
        # releases the GIL, as in `encode`
        return str(_call(self._tokenizer.decode_batch, [token_ids], skip_special_tokens=False)[0])

    def entries(self, token_ids: Iterable[int]) -> list[str]:
        """Return the vocabulary's entries; empty for ids beyond it, which padded embeddings have."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, even if they are only part of a character."""
        text = self.token_text(token_id)
        if "\ufffd" not in text:
            return text.encode()
        piece = self._tokenizer.id_to_token(token_id) or ""
        if (byte := _BYTE_PIECE.fullmatch(piece)) and not self._spells_bytes:
            return bytes.fromhex(byte[1])
        return spell(piece) if all(letter in _BYTE_OF_LETTER for letter in piece) else text.encode()


def _call(ask: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Call the tokenizers library and convert its panics to RuntimeError.

    A panic, as of a regex that takes too long, derives from BaseException and would bypass the error handling of
    requests.
    """
    try:
        return ask(*given, **options)
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RuntimeError("the tokenizers library panicked") from error


def spell(piece: str) -> bytes:
    """Return the bytes of an entry of a byte-level vocabulary; added tokens may be plain text."""
    try:
        return bytes([_BYTE_OF_LETTER[letter] for letter in piece])
    except KeyError:
        return piece.encode()


_BYTE_OF_LETTER = byte_letters()
# SentencePiece's spelling of a byte of a character that is not in the vocabulary.
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
