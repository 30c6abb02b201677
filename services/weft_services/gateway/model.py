"""Served models: what the gateway loads of a checkpoint (no weights), and the catalog that looks them up."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from weft.errors import BadCheckpoint, InvalidRequest, ModelFailed, NotFound
from weft.file_io import path_exists, read_small, to_weft_error
from weft.grammar import Grammars
from weft.model.config import read_config
from weft.model.fields import read_json
from weft.tokenizer import SETTINGS, read_end_token, read_special_tokens, read_tokenizer, tokenizer_path
from weft_services.gateway.access.authentication import current_principal
from weft_services.gateway.generation import Conversation, SamplingDefaults
from weft_services.gateway.text.assistant import HARMONY_THOUGHTS, ThoughtTags, find_thought_tags, tag_pieces
from weft_services.gateway.text.chat_template import ChatTemplate
from weft_services.gateway.text.codec import Codec, SegmentedEncoder
from weft_services.gateway.text.special_tokens import GuardImpossible, SpecialTokenGuard, check_samples
from weft_services.gateway.text.tool_formats import HARMONY, PROBE, ToolFormat, choose_format

logger = logging.getLogger(__name__)
# The files that transformers writes; the second template renders conversations with tools.
TEMPLATE_FILES = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}

_CALL = {"id": "call00001", "type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
_TOOL = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {"type": "object"}}}
_USER = {"role": "user", "content": "What time is it?"}
_SAID = {"role": "assistant", "content": "It is noon."}
PROBES = {
    "user": Conversation((_USER,)),
    "system": Conversation(({"role": "system", "content": "Be brief."}, _USER)),
    "history": Conversation((_USER, _SAID, _USER)),
    "tools": Conversation((_USER,), (_TOOL,)),
    "calls": Conversation(
        (
            _USER,
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call00001", "name": "now", "content": "noon"},
        ),
        (_TOOL,),
    ),
}
"""Rendered at the start, so that what a template cannot do shows before the first request."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One served model. `template` is None for a base model without a chat template.

    - `written`: tokenizes rendered templates.
    - `chats`: the same, with a cache of known segments.
    - `chat_codec`: its text includes the special tokens that mark calls and thoughts.
    - `thought_tags`: None if the template knows no thoughts.
    - `marks`: the ids of these tokens.
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
    written: Codec
    chats: SegmentedEncoder
    tool_format: ToolFormat | None
    thought_tags: ThoughtTags | None
    marks: dict[str, int]

    @property
    def has_channels(self) -> bool:
        """True if answers are messages in channels, with or without tools."""
        return self.thought_tags == HARMONY_THOUGHTS

    @property
    def end_thoughts_id(self) -> int | None:
        """The token that ends thoughts; None if there is none."""
        return self.marks.get(self.thought_tags[1]) if self.thought_tags else None


def load_model(
    directory: Path, name: str, tool_format: str = "auto", escapes_special_tokens: bool = False
) -> ServedModel:
    """Load a checkpoint for the gateway. `escapes_special_tokens`: special tokens in messages are plain text.

    Raises BadCheckpoint naming the file or setting at fault, StorageUnavailable.
    """
    config, content = read_config(directory), read_tokenizer(directory)
    try:
        tokenizer = Tokenizer.from_buffer(content)
        codec = Codec(tokenizer)
    except Exception as error:  # the library raises bare Exception
        raise BadCheckpoint(f"{tokenizer_path(directory)}: {error}") from error
    if (end := read_end_token(directory)) and not end.ids:
        logger.warning("end token ignored, not in the vocabulary model=%s eos_token=%r", name, end.text)
    template, written = _load_template(directory), codec
    chosen = choose_format(tool_format, rendered_call(template) if template else "")
    if escapes_special_tokens and template:
        template, written = _guard_special_tokens(
            directory, partial(SpecialTokenGuard, content, tokenizer), template, codec
        )
    if template:
        _check_probes(template, name, directory)
    source = template.all_sources if template else ""
    thought_tags = HARMONY_THOUGHTS if chosen is HARMONY else find_thought_tags(source)
    markers = chosen.markers if chosen else ()
    if thought_tags == HARMONY_THOUGHTS:
        markers += HARMONY.markers
    marks = codec.marks((*(piece for tag in thought_tags or () for piece in tag_pieces(tag)), *markers))
    return ServedModel(
        name=name,
        created=int((directory / "config.json").stat().st_mtime),
        codec=codec,
        template=template,
        defaults=_load_defaults(directory),
        vocabulary_size=config.vocab_size,
        max_context_tokens=config.max_positions,
        grammars=Grammars(content, config.vocab_size, config.eos_token_ids),
        chat_codec=codec.with_visible_tokens(marks.values()),
        written=written,
        chats=written.segmented(source),
        tool_format=chosen,
        thought_tags=thought_tags,
        marks=marks,
    )


def rendered_call(template: ChatTemplate) -> str:
    """Return the answer of PROBE as the template writes it; empty if it does not render calls.

    The text behind the question stands for it if the template writes something else before an answer to come.
    """
    try:
        whole = template.render(PROBE)
        prompt = template.render(Conversation(PROBE.messages[:1], PROBE.tools))
    except (InvalidRequest, ModelFailed):
        return ""
    return whole[len(prompt) :] if whole.startswith(prompt) else whole.rpartition(PROBE.messages[0]["content"])[2]


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path).values if path_exists(path) else {}


def _read_text(path: Path) -> str:
    try:
        return TextIOWrapper(BytesIO(read_small(path)), encoding="utf-8").read()
    except OSError as error:
        raise to_weft_error(error, f"{path}: not readable") from error
    except UnicodeDecodeError as error:
        raise BadCheckpoint(f"{path}: not readable as text: {error}") from error


def _guard_special_tokens(
    directory: Path, make_guard: Callable[[], SpecialTokenGuard], plain: ChatTemplate, codec: Codec
) -> tuple[ChatTemplate, Codec]:
    try:
        guard = make_guard()
        template, written = _load_template(directory, guard), Codec(guard.tokenizer)
        assert template is not None  # the plain template exists
        encode, encode_written = (partial(each.encode, add_special_tokens=False) for each in (codec, written))
        check_samples(lambda chat: encode(plain.render(chat)), lambda chat: encode_written(template.render(chat)))
    except GuardImpossible as error:
        raise BadCheckpoint(
            f"{directory}: special tokens in messages cannot be told from the template's: {error}. "
            "Set WEFT_ALLOW_USER_SPECIAL_TOKENS=1 to accept special tokens in messages"
        ) from error
    return template, written


def _check_probes(template: ChatTemplate, name: str, directory: Path) -> None:
    """Warn of probes that the template cannot render. Raises BadCheckpoint if it cannot render a plain question."""
    for kind, conversation in PROBES.items():
        if problem := template.try_out(conversation):
            if kind == "user":
                raise BadCheckpoint(f"{directory}: the chat template cannot render a plain question: {problem}")
            logger.warning("chat template fails model=%s conversation=%r error=%r", name, kind, problem)


def _load_template(directory: Path, guard: SpecialTokenGuard | None = None) -> ChatTemplate | None:
    settings = _read_json(directory / SETTINGS)
    found = settings.get("chat_template")
    named = {entry.get("name"): entry.get("template") for entry in found} if isinstance(found, list) else {}
    for name, path in ((name, directory / file) for name, file in TEMPLATE_FILES.items()):
        if path_exists(path):
            named[name] = _read_text(path)
    source = named.get("default") or (found if isinstance(found, str) else None)
    if source is None:
        return None
    try:
        return ChatTemplate(source, read_special_tokens(directory), named.get("tool_use"), guard)
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{directory}: {error}") from error


def _load_defaults(directory: Path) -> SamplingDefaults:
    """Return the defaults of generation_config.json. A model that does not sample by default is greedy."""
    path = directory / "generation_config.json"
    settings = _read_json(path)
    if settings.get("do_sample") is False:  # greedy, but the penalty still changes which token is the most likely
        settings = {"temperature": 0.0, "repetition_penalty": settings.get("repetition_penalty")}
    known: dict[str, Any] = {}
    for key, is_usable in _USABLE_DEFAULTS.items():
        value = settings.get(key)
        if value is None:
            continue
        if not isinstance(value, int | float) or not is_usable(value):
            raise BadCheckpoint(f"{path}: {key} is {value!r}, which is out of range")
        known[key] = max(value, 0)  # top_k -1 is another spelling of 0
    return SamplingDefaults(**known)


# The values that requests may use. Comparisons are false for NaN.
_USABLE_DEFAULTS: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value < math.inf,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: isinstance(value, int) and -1 <= value < 2**31,
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: 0 < value < math.inf,
}


# Longest part of an unknown model name that an error repeats; served names are at most as long.
MAX_NAME_CHARS_IN_ERRORS = 256


class Catalog:
    """Served models by name, in configuration order."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models = {model.name: model for model in models}

    def __iter__(self) -> Iterator[ServedModel]:
        may_use = current_principal.get().may_use
        return (model for name, model in self._models.items() if may_use(name))

    @property
    def names(self) -> list[str]:
        return [model.name for model in self]

    def resolve(self, name: str) -> ServedModel:
        """Return the model of that name, or the only one if the name is empty.

        Raises NotFound, or InvalidRequest if the name is empty and several models are served.
        """
        names = self.names
        if not name and len(names) > 1:
            raise InvalidRequest(f"model: expected one of {_listed(names)}", "model")
        return self.find(name or "".join(names))

    def find(self, name: str) -> ServedModel:
        """Return the model of that name. Raises NotFound, which lists the names."""
        if name in self._models and current_principal.get().may_use(name):
            return self._models[name]
        names, name = self.names, name[:MAX_NAME_CHARS_IN_ERRORS]
        if not names:
            raise NotFound(f"the model {name!r} is not served here, or not to this API key")
        raise NotFound(f"the model {name!r} is not served here; use {_listed(names)}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def load_catalog(
    directories: Mapping[str, Path], tool_formats: Mapping[str, str], escapes_special_tokens: bool = False
) -> Catalog:
    """Load what the gateway needs of each checkpoint. Raises BadCheckpoint naming the file or setting.

    `escapes_special_tokens`: special tokens in messages are plain text.
    """
    return Catalog(
        load_model(path, name, tool_formats[name], escapes_special_tokens) for name, path in directories.items()
    )
