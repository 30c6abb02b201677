"""Text to token ids and back, by one model's tokenizer. Knows no request and no model directory."""

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

# each text is tokenized alone, by the thread that asks: to wake one of the library's own for it, and to wait for that,
# takes a twentieth of a short request's time
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
FEW_IDS = 1024


class Codec:
    """Text <-> token ids. `encode` belongs in a thread; `decode` of a few ids is a matter of microseconds."""

    def __init__(self, tokenizer: Tokenizer, spoken: frozenset[int] = frozenset()) -> None:
        """`spoken`: special tokens whose text is part of an answer all the same, such as those around tool calls."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._special = special
        self._hidden = special - spoken if special & spoken else None
        self._spells_bytes = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._spelling: dict[int, bytes] = {}  # of the tokens that answers have had so far
        self._texts: dict[int, str] = {}  # of those that logprobs have shown
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.longest_token_bytes = max(len(token.encode()) for token in vocabulary)
        self._byte_of = {} if self._spells_bytes else self._byte_tokens(vocabulary)

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """All ids of a text; with `add_special_tokens` whatever the tokenizer puts around one, such as BOS."""
        # `encode` would hold the interpreter's lock, for 0.4 s with 160,000 tokens; a batch is encoded without it
        (encoding,) = _call(self._tokenizer.encode_batch_fast, [text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def segmented(self, template: str) -> SegmentedEncoder:
        """For prompts that this template renders."""
        encode = partial(self.encode, add_special_tokens=False)
        return SegmentedEncoder(encode, message_marks(self._tokenizer, template))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens, those that are spoken excepted."""
        if self._hidden is None:
            return str(_call(self._tokenizer.decode, token_ids, skip_special_tokens=True))
        spoken = [token for token in token_ids if token not in self._hidden]
        return str(_call(self._tokenizer.decode, spoken, skip_special_tokens=False))

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """For one answer: what `decode` says of all of it, as it comes. `context`: the last tokens before it, where it
        goes on with a text; other vocabularies than byte-level ones begin a text without its first space."""
        return ByteDetokenizer(self._spell) if self._spells_bytes else self._windowed(self.decode, context)

    def whole_detokenizer(self) -> Detokenizer:
        """The same for what `whole_text` says."""
        return ByteDetokenizer(self.token_bytes) if self._spells_bytes else self._windowed(self.whole_text)

    def _windowed(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> Detokenizer:
        if self._byte_of:
            return FallbackDetokenizer(decode, self._byte_of, context)
        return WindowDetokenizer(decode, context)

    def _byte_tokens(self, vocabulary: dict[str, int]) -> dict[int, bytes]:
        """Those that are a byte of a text, where the decoder reads them as such."""
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
        """Is it one of those that end or mark what is said."""
        return token_id in self._special

    def with_visible_tokens(self, spoken: Iterable[int]) -> Codec:
        """The same, with these special tokens as text."""
        return Codec(self._tokenizer, frozenset(spoken))

    def marks(self, markers: Iterable[str]) -> dict[str, int]:
        """Those of the markers that are tokens of their own."""
        added = {token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items()}
        return {marker: added[marker] for marker in markers if marker in added}

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones included, as it would be amid an answer: what logprobs show."""
        text = self._texts.get(token_id)
        if text is None:
            text = alone = self.whole_text([token_id])
            # other vocabularies than byte-level ones write the space before a word into it, and leave out the first
            if not self._spells_bytes:
                text = self.whole_text([token_id, token_id])[len(alone) :]
            self._texts[token_id] = text
        return text

    def whole_text(self, token_ids: Sequence[int]) -> str:
        """All that is written there, special tokens included."""
        if len(token_ids) <= FEW_IDS:
            return str(_call(self._tokenizer.decode, token_ids, skip_special_tokens=False))
        # as with `encode`: without the interpreter's lock
        return str(_call(self._tokenizer.decode_batch, [token_ids], skip_special_tokens=False)[0])

    def entries(self, token_ids: Iterable[int]) -> list[str]:
        """The tokens as the vocabulary has them; ids beyond it, as padded embeddings have, are empty."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, also where they are a part of a character only."""
        text = self.token_text(token_id)
        if "\ufffd" not in text:
            return text.encode()
        piece = self._tokenizer.id_to_token(token_id) or ""
        if (byte := _BYTE_PIECE.fullmatch(piece)) and not self._spells_bytes:
            return bytes.fromhex(byte[1])
        return spell(piece) if all(letter in _BYTE_OF_LETTER for letter in piece) else text.encode()


def _call(ask: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """The library's answer. A panic of its own, as where a regex takes too long over a text, is no Exception and would
    pass by everybody who tells clients of failures: it is made one."""
    try:
        return ask(*given, **options)
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RuntimeError("the tokenizer's library has panicked") from error


def spell(piece: str) -> bytes:
    """The bytes that a byte-level vocabulary means by one of its entries; added tokens may be plain text."""
    try:
        return bytes([_BYTE_OF_LETTER[letter] for letter in piece])
    except KeyError:
        return piece.encode()


_BYTE_OF_LETTER = byte_letters()
# a byte of a character that the vocabulary does not have, as SentencePiece writes it
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
