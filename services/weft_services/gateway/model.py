"""The served model as the gateway knows it: tokenizer, chat template, generation defaults, limits. No weights."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders

from weft.errors import BadCheckpoint
from weft.grammar import Grammars
from weft.model.config import read_config
from weft.model.fields import read_json
from weft.storage import read_small, told
from weft.tokenizer import SETTINGS, TOKENIZER, byte_letters, read_tokenizer
from weft_services.gateway.generation import SamplingDefaults
from weft_services.gateway.text.assistant import END_THINK, THINK
from weft_services.gateway.text.chat_template import SPECIAL_TOKENS, ChatTemplate
from weft_services.gateway.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    FallbackDetokenizer,
    WindowDetokenizer,
)
from weft_services.gateway.text.segments import SegmentedEncoder, message_marks
from weft_services.gateway.text.tool_formats import ToolFormat, choose_format

# each text is tokenized alone, by the thread that asks: to wake one of the library's own for it, and to wait for that,
# takes a twentieth of a short request's time
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
FEW_IDS = 1024
# as transformers saves them; the second renders conversations that have tools
TEMPLATE_FILES = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}


class Codec:
    """Text <-> token ids. `encode` belongs in a thread; `decode` of a few ids is a matter of microseconds."""

    def __init__(self, tokenizer: Tokenizer, spoken: frozenset[int] = frozenset()) -> None:
        """`spoken`: special tokens whose text is part of an answer all the same, such as those around tool calls."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._special = special
        self._silent = special - spoken if special & spoken else None
        self._spells_bytes = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._spelling: dict[int, bytes] = {}  # of the tokens that answers have had so far
        self._texts: dict[int, str] = {}  # of those that logprobs have shown
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.longest_token_bytes = max(len(token.encode()) for token in vocabulary)
        self._byte_of = {} if self._spells_bytes else self._byte_tokens(vocabulary)

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """All ids of a text; with `add_special_tokens` whatever the tokenizer puts around one, such as BOS."""
        # `encode` would hold the interpreter's lock, for 0.4 s with 160,000 tokens; a batch is encoded without it
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def segmented(self, template: str) -> SegmentedEncoder:
        """For prompts that this template renders."""
        encode = partial(self.encode, add_special_tokens=False)
        return SegmentedEncoder(encode, message_marks(self._tokenizer, template))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens, those that are spoken excepted."""
        if self._silent is None:
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
        spoken = [token for token in token_ids if token not in self._silent]
        return str(self._tokenizer.decode(spoken, skip_special_tokens=False))

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
            is_silent = token_id in (self._special if self._silent is None else self._silent)
            spelled = b"" if is_silent else spell(self._tokenizer.id_to_token(token_id) or "")
            self._spelling[token_id] = spelled
        return spelled

    def is_special(self, token_id: int | None) -> bool:
        """Is it one of those that end or mark what is said."""
        return token_id in self._special

    def speaking(self, spoken: Iterable[int]) -> Codec:
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
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
        # as with `encode`: without the interpreter's lock
        return str(self._tokenizer.decode_batch([token_ids], skip_special_tokens=False)[0])

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


def spell(piece: str) -> bytes:
    """The bytes that a byte-level vocabulary means by one of its entries; added tokens may be plain text."""
    try:
        return bytes([_BYTE_OF_LETTER[letter] for letter in piece])
    except KeyError:
        return piece.encode()


_BYTE_OF_LETTER = byte_letters()
# a byte of a character that the vocabulary does not have, as SentencePiece writes it
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model. `template` is None for a base model without a chat template.

    `chats` has the ids of conversations; `chat_codec` shows the special tokens that calls and thoughts are marked with;
    `marks` are their ids.
    """

    name: str
    created: int
    codec: Codec
    template: ChatTemplate | None
    defaults: SamplingDefaults
    vocabulary_size: int
    max_context_tokens: int
    grammars: Grammars
    chat_codec: Codec
    chats: SegmentedEncoder
    tool_format: ToolFormat | None
    thinks: bool
    marks: dict[str, int]


def load_model(directory: Path, name: str, tool_format: str = "auto") -> ServedModel:
    """Read what the gateway needs of a checkpoint.

    Raises BadCheckpoint naming the file or setting at fault, Unreadable.
    """
    config, content = read_config(directory), read_tokenizer(directory)
    try:
        codec = Codec(Tokenizer.from_buffer(content))
    except Exception as error:  # the library raises bare Exception
        raise BadCheckpoint(f"{directory / TOKENIZER}: {error}") from error
    template = _load_template(directory)
    source = template.all_sources if template else ""
    chosen = choose_format(tool_format, source)
    thinks = END_THINK in source
    marks = codec.marks(((THINK, END_THINK) if thinks else ()) + (chosen.markers if chosen else ()))
    return ServedModel(
        name=name,
        created=int((directory / "config.json").stat().st_mtime),
        codec=codec,
        template=template,
        defaults=_load_defaults(directory),
        vocabulary_size=config.vocab_size,
        max_context_tokens=config.max_positions,
        grammars=Grammars(content, config.vocab_size, config.eos_token_ids),
        chat_codec=codec.speaking(marks.values()),
        chats=codec.segmented(source),
        tool_format=chosen,
        thinks=thinks,
        marks=marks,
    )


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path).values if path.exists() else {}


def _read_text(path: Path) -> str:
    try:
        return TextIOWrapper(BytesIO(read_small(path)), encoding="utf-8").read()
    except OSError as error:
        raise told(error, f"{path}: not readable") from error
    except UnicodeDecodeError as error:
        raise BadCheckpoint(f"{path}: not readable as text: {error}") from error


def _load_template(directory: Path) -> ChatTemplate | None:
    settings = _read_json(directory / SETTINGS)
    found = settings.get("chat_template")
    named = {entry.get("name"): entry.get("template") for entry in found} if isinstance(found, list) else {}
    for name, path in ((name, directory / file) for name, file in TEMPLATE_FILES.items()):
        if path.exists():
            named[name] = _read_text(path)
    source = named.get("default") or (found if isinstance(found, str) else None)
    if source is None:
        return None
    special = {}
    for key in SPECIAL_TOKENS:
        token = settings.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            special[key] = text
    try:
        return ChatTemplate(source, special, named.get("tool_use"))
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{directory}: {error}") from error


def _load_defaults(directory: Path) -> SamplingDefaults:
    """What generation_config.json says; a model that does not sample by default is greedy."""
    path = directory / "generation_config.json"
    settings = _read_json(path)
    if settings.get("do_sample") is False:  # this leaves no choice between tokens, but a penalty says which one it is
        settings = {"temperature": 0.0, "repetition_penalty": settings.get("repetition_penalty")}
    known: dict[str, Any] = {}
    for key, is_usable in _USABLE_DEFAULTS.items():
        value = settings.get(key)
        if value is None:
            continue
        if not isinstance(value, int | float) or not is_usable(value):
            raise BadCheckpoint(f"{path}: {key} is {value!r}, which no request could use")
        known[key] = max(value, 0)  # top_k -1 is another spelling of 0
    return SamplingDefaults(**known)


# what requests may ask for; comparisons are false for NaN
_USABLE_DEFAULTS: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value < math.inf,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: isinstance(value, int) and -1 <= value < 2**31,
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: 0 < value < math.inf,
}
