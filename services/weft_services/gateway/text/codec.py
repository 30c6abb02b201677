"""Converts text to token ids and back, with one model's tokenizer.

Answers are decoded incrementally; the pieces join to exactly what decoding all ids gives. Byte-level vocabularies,
which nearly all models have, spell every token as bytes, so the bytes are decoded as UTF-8. For any other vocabulary a
short window of ids is decoded again. Tokens that stand for a single byte are decoded as UTF-8 there, too. The work per
token is bounded in all cases.

The ids of long prompts are cached per message, so that the earlier turns of a chat are not tokenized again. Tokenizers
split a text at special tokens first and encode the pieces independently, so cutting a text before a special token does
not change its ids.
"""

from __future__ import annotations

import codecs
import os
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any, Protocol

from tokenizers import AddedToken, Tokenizer, decoders

from weft.tokenizer import byte_letters

# Each text is tokenized in the calling thread. Waking one of the library's threads takes 5% of a short request's time.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
FEW_IDS = 1024


class Codec:
    """Text <-> token ids. Call `encode` in a thread; decoding a few ids takes microseconds."""

    def __init__(self, tokenizer: Tokenizer, visible: frozenset[int] = frozenset()) -> None:
        """`visible`: special tokens that are part of the answer's text, such as those around tool calls."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._special = special
        self._hidden = special - visible if special & visible else None
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
        visible = [token for token in token_ids if token not in self._hidden]
        return str(_call(self._tokenizer.decode, visible, skip_special_tokens=False))

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
        return token_id in self._special

    def with_visible_tokens(self, token_ids: Iterable[int]) -> Codec:
        """Return a codec that shows these special tokens as text."""
        return Codec(self._tokenizer, frozenset(token_ids))

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


REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so at most 3 can wait for the rest; byte fallback shows each as one mark.
MAX_HELD_MARKS = 3
# Beyond this many ids without a clean boundary the output is broken UTF-8, and the window is cut anyway.
MAX_WINDOW = 32
MAX_CUT = 8
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Incremental detokenizer of one sequence."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the new text; an incomplete character at the end is held back."""

    def flush(self) -> str:
        """Return what is held back, including replacement marks. Call it once, at the end."""


class ByteDetokenizer:
    """For byte-level vocabularies. `bytes_of` returns a token's bytes; empty for hidden tokens."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decode = _new_utf8_decoder("replace").decode

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For any vocabulary. The window holds the last clean group of ids as context, then the unsettled ids."""

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        """`context`: the tokens before the answer; their text is not returned."""
        self._decode = decode
        self._window = list(context)
        self._num_context = len(context)
        # the part of the window's text that was returned
        self._shown = "" if not context else (text := decode(self._window))[: len(text) - _held_marks(text)]

    def push(self, token_ids: Sequence[int]) -> str:
        self._window.extend(token_ids)
        text = self._decode(self._window)
        held = _held_marks(text)
        settled = text[: len(text) - held]
        fresh = settled[len(self._shown) :]
        if held:
            self._shown = max(self._shown, settled, key=len)
            self._bound(text, held)
        elif fresh:
            self._settle()
        # Ids without text, such as special tokens. They stay in the window, because only the first token of a text
        # loses its space.
        else:
            del self._window[self._num_context + MAX_CUT :]
        return fresh

    def flush(self) -> str:
        rest = self._decode(self._window)[len(self._shown) :]
        self._window.clear()
        self._num_context, self._shown = 0, ""
        return rest

    def _settle(self) -> None:
        """Make the group that ends here the context of the next one."""
        del self._window[: self._num_context]
        self._num_context = len(self._window)
        self._shown = self._decode(self._window)

    def _bound(self, text: str, held: int) -> None:
        """Cut the head off a long window where that does not change the text."""
        if len(self._window) <= MAX_WINDOW:
            return
        for cut in range(1, MAX_CUT + 1):
            tail = self._decode(self._window[-cut:])
            if len(tail) >= held and self._decode(self._window[:-cut]) + tail == text:
                del self._window[:-cut]
                self._num_context, self._shown = 0, tail[: len(tail) - held]
                return


class FallbackDetokenizer:
    """For a vocabulary with tokens for single bytes, such as Llama 2's and Gemma's.

    Its decoder replaces a whole run of such tokens by marks while the last character is incomplete, and permanently if
    one is invalid. So runs bypass the window here, and only invalid bytes become marks.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], byte_of: Mapping[int, bytes], context: Sequence[int] = ()
    ) -> None:
        """`byte_of`: the tokens that stand for one byte. `context`: as in WindowDetokenizer."""
        self._decode, self._byte_of = decode, byte_of
        # Stands in for a run of bytes as the context of the next words, so that they keep their first space.
        self._letter = [token_id for token_id, byte in byte_of.items() if byte == b"A"]
        self._words = WindowDetokenizer(decode, context)
        self._bytes = _new_utf8_decoder("replace")
        self._in_run = False
        for token_id in context:
            self._in_run = token_id in byte_of
            self._bytes.decode(byte_of.get(token_id, b""), not self._in_run)

    def push(self, token_ids: Sequence[int]) -> str:
        if not self._in_run and self._byte_of.keys().isdisjoint(token_ids):
            return self._words.push(token_ids)
        return "".join(map(self._push_one, token_ids))

    def flush(self) -> str:
        return self._bytes.decode(b"", True) if self._in_run else self._words.flush()

    def _push_one(self, token_id: int) -> str:
        byte = self._byte_of.get(token_id)
        if byte is not None:
            rest = "" if self._in_run else self._words.flush()
            self._in_run = True
            return rest + self._bytes.decode(byte)
        if not self._in_run:
            return self._words.push((token_id,))
        self._in_run = False
        self._words = WindowDetokenizer(self._decode, self._letter)
        return self._bytes.decode(b"", True) + self._words.push((token_id,))


def _held_marks(text: str) -> int:
    held = 0
    while held < min(MAX_HELD_MARKS, len(text)) and text[-1 - held] == REPLACEMENT:
        held += 1
    return held


# Tokenizing shorter texts is faster than cutting them and looking them up.
MIN_CHARS = 4096
MAX_BYTES = 64 << 20
WORD = re.compile(r"\w")
# Memory of an entry in addition to its text and ids: key, table, array.
OVERHEAD_BYTES = 400

Key = tuple[bytes, str]


def message_marks(tokenizer: Tokenizer, template: str) -> list[str]:
    """Return the special tokens of the template before which a text can be cut."""
    added = list(tokenizer.get_added_tokens_decoder().values())
    return [
        token.content
        for token in added
        if token.content in template
        and not (token.normalized or token.single_word or token.lstrip)
        and not any(_overlaps(other.content, token.content) or _looks(other, token.content) for other in added)
    ]


def _overlaps(other: str, mark: str) -> bool:
    """True if a token that begins before the mark can include some of it."""
    if other.find(mark, 1) > 0:
        return True
    return any(mark.startswith(other[start:]) for start in range(1, len(other)))


def _looks(other: AddedToken, mark: str) -> bool:
    """True if a token depends on text across the cut, after its end or before the mark."""
    if other.content.startswith(mark):
        return other.single_word or other.lstrip
    return other.single_word and WORD.match(mark) is not None


class SegmentedEncoder:
    """Encoder of one model. The cache is separate per tenant, so that timing reveals nothing about other tenants."""

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        marks: Sequence[str],
        min_chars: int = MIN_CHARS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`encode` returns the ids of a text without added special tokens; several threads may call it."""
        self._encode, self._marks = encode, tuple(marks)
        self._min_chars, self._max_bytes = min_chars, max_bytes
        self._cache: OrderedDict[Key, array[int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = Lock()

    def encode(self, text: str, salt: bytes) -> tuple[int, ...]:
        """Return the ids of the text without added special tokens. `salt` identifies the tenant's cache."""
        if len(text) < self._min_chars:
            return tuple(self._encode(text))
        keys = [(salt, piece) for piece in self._cut(text)]
        known = self._look_up(keys)
        if missing := [key for key in dict.fromkeys(keys) if key not in known]:
            fresh = {key: array("I", self._encode(key[1])) for key in missing}
            self._store(fresh)
            known |= fresh
        ids = array("I")
        for key in keys:
            ids += known[key]
        return tuple(ids)

    def _cut(self, text: str) -> list[str]:
        pieces = [text]
        for mark in self._marks:
            if mark not in text:
                continue
            pieces = [part for piece in pieces for part in _before_each(mark, piece)]
        return pieces

    def _look_up(self, keys: Sequence[Key]) -> dict[Key, array[int]]:
        with self._lock:
            known = {key: ids for key in keys if (ids := self._cache.get(key)) is not None}
            for key in known:
                self._cache.move_to_end(key)
        return known

    def _store(self, fresh: dict[Key, array[int]]) -> None:
        with self._lock:
            for key, ids in fresh.items():
                if key not in self._cache:
                    self._cache[key] = ids
                    self._num_bytes += _size(key, ids)
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _size(*self._cache.popitem(last=False))


def _before_each(mark: str, text: str) -> list[str]:
    first, *rest = text.split(mark)
    pieces = [mark + piece for piece in rest]
    return [first, *pieces] if first else pieces


def _size(key: Key, ids: array[int]) -> int:
    return 4 * (len(key[1]) + len(ids)) + OVERHEAD_BYTES
