"""The tool call formats by name: how to recognize, parse and write each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from weft.errors import BadCheckpoint
from weft_services.gateway.generation import Conversation
from weft_services.gateway.text import tool_parsers
from weft_services.gateway.text.gemma_calls import CALL, quoted_calls
from weft_services.gateway.text.harmony import CHANNEL, CONSTRAIN, FINAL_PIECES, FUNCTIONS, MARKS, MESSAGE, harmony
from weft_services.gateway.text.parts import Parser, PartKind, Parts, TextBuffer, new_call_id, new_short_id
from weft_services.gateway.text.tag_calls import Schemas, TagSyntax

# placeholders in the template of a call
NAME, ARGUMENTS, SPACE, NUMBER = "\0name", "\0arguments", "\0space", "\0number"
PLACEHOLDERS = (NAME, ARGUMENTS, SPACE, NUMBER)

# A call that templates render, to see how they write calls.
PROBE_NAME, PROBE_ARGUMENTS = "get_weather", {"city": "Paris"}
_PROBE_SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "city"}}}
_PROBE_USER: dict[str, Any] = {"role": "user", "content": "How is the weather in Paris?"}
_PROBE_FUNCTION = {"name": PROBE_NAME, "arguments": PROBE_ARGUMENTS}
_PROBE_CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call00001", "type": "function", "function": _PROBE_FUNCTION}],
}
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": PROBE_NAME, "description": "Get the weather.", "parameters": _PROBE_SCHEMA},
}
PROBE = Conversation((_PROBE_USER, _PROBE_CALLS), (_PROBE_TOOL,), is_open=False)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format. `call` is the template of one call, `opening` and `closing` surround all calls.

    - `markers`: strings that may be single tokens.
    - `tags`: the tags of arguments that are not JSON.
    - `ends_thoughts`: markers that end thoughts as `</think>` does.
    - `is_enforceable`: grammars can constrain an answer to this format.
    - `max_calls`: most calls in one answer that a grammar allows.
    - `text_opening`: precedes an answer without calls.
    """

    name: str
    parser: Callable[[Schemas], Parser]
    markers: tuple[str, ...]
    call: tuple[str, ...]
    opening: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    new_id: Callable[[], str] = new_call_id
    tags: TagSyntax | None = None
    ends_thoughts: tuple[str, ...] = ()
    is_enforceable: bool = True
    max_calls: int = 16
    text_opening: tuple[str, ...] = ()

    @property
    def has_marker(self) -> bool:
        """True if a marker precedes the first call."""
        return (*self.opening, *self.call)[0] in self.markers

    @property
    def call_openings(self) -> tuple[str, ...]:
        """The marker before the first call, unless it ends thoughts."""
        return (*self.opening, *self.call)[:1] if self.has_marker and not self.ends_thoughts else ()

    def reads_probe(self, rendered: str) -> bool:
        """True if the parser finds the call of PROBE in what a template made of it."""
        if self.has_marker and (*self.opening, *self.call)[0] not in rendered:
            return False
        buffer, parts = TextBuffer(), Parts(self.new_id)
        buffer.text, buffer.is_over = rendered, True
        for _ in self.parser({PROBE_NAME: _PROBE_SCHEMA})(buffer, parts):
            pass
        names = [part.text for part in parts.found if part.kind is PartKind.CALL]
        arguments = "".join(part.text for part in parts.found if part.kind is PartKind.ARGUMENTS)
        return names == [PROBE_NAME] and json.loads(arguments) == PROBE_ARGUMENTS

    def is_written_in(self, rendered: str) -> bool:
        """True if the pieces of a call come in this order; white space in and between them does not count."""
        text, at = "".join(rendered.split()), 0
        for piece in (*self.opening, *self.call, *self.closing):
            literal = PROBE_NAME if piece == NAME else "" if piece in PLACEHOLDERS else "".join(piece.split())
            at = text.find(literal, at) + len(literal)
            if at < len(literal):
                return False
        return True


def _always(parser: Parser) -> Callable[[Schemas], Parser]:
    return lambda schemas: parser


_OBJECT = ('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}")
_SEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)
HERMES = ToolFormat(
    "hermes",
    _always(tool_parsers.tagged_objects("<tool_call>", "</tool_call>")),
    markers=("<tool_call>", "</tool_call>"),
    call=("<tool_call>", SPACE, *_OBJECT, SPACE, "</tool_call>"),
    between=(SPACE,),
)
MISTRAL = ToolFormat(
    "mistral",
    _always(tool_parsers.mistral),
    markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    call=_OBJECT,
    opening=("[TOOL_CALLS]", SPACE, "["),
    between=(", ",),
    closing=("]",),
    new_id=new_short_id,
)
MISTRAL_ARGS = ToolFormat(
    "mistral-args",
    _always(tool_parsers.mistral),
    markers=MISTRAL.markers,
    call=("[TOOL_CALLS]", NAME, "[ARGS]", ARGUMENTS),
    new_id=new_short_id,
)
DEEPSEEK_V3 = ToolFormat(
    "deepseek-v3",
    _always(tool_parsers.deepseek),
    markers=_SEEK,
    call=(_SEEK[2], "function", _SEEK[4], NAME, "\n```json\n", ARGUMENTS, "\n```", _SEEK[3]),
    opening=(_SEEK[0],),
    between=("\n",),
    closing=(_SEEK[1],),
)
DEEPSEEK_V31 = ToolFormat(
    "deepseek-v3.1",
    _always(tool_parsers.deepseek),
    markers=_SEEK,
    call=(_SEEK[2], NAME, _SEEK[4], ARGUMENTS, _SEEK[3]),
    opening=(_SEEK[0],),
    closing=(_SEEK[1],),
)
KIMI = ToolFormat(
    "kimi",
    _always(tool_parsers.kimi),
    markers=_KIMI,
    call=(_KIMI[2], "functions.", NAME, ":", NUMBER, _KIMI[4], ARGUMENTS, _KIMI[3]),
    opening=(_KIMI[0],),
    closing=(_KIMI[1],),
    ends_thoughts=(_KIMI[0], _KIMI[2]),
)
LLAMA = ToolFormat(
    "llama",
    lambda schemas: tool_parsers.llama(frozenset(schemas)),
    markers=("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    call=('{"name": "', NAME, '", "parameters": ', ARGUMENTS, "}"),
    between=("; ",),
)
# Llama and ToolACE with templates that write Python; the reader is the same.
PYTHONIC = replace(LLAMA, name="pythonic", call=("[", NAME, "(", ARGUMENTS, ")", "]"), is_enforceable=False)
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_QWEN_TAGS = TagSyntax(
    call=_TOOL_CALL,
    name=("<function=", ">"),
    end="</function>",
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    padding="\n",
)
_SEED_CALL = ("<seed:tool_call>", "</seed:tool_call>")
_SEED_TAGS = replace(_QWEN_TAGS, call=_SEED_CALL, padding="")
_GLM_ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_GLM_TAGS = TagSyntax(call=_TOOL_CALL, name=("", ""), key=_GLM_ARGUMENTS[:2], value=_GLM_ARGUMENTS[2:])
_MINIMAX_SECTION = ("<minimax:tool_call>", "</minimax:tool_call>")
_MINIMAX_TAGS = TagSyntax(
    sections=(_MINIMAX_SECTION,),
    name=('<invoke name="', '">'),
    end="</invoke>",
    key=('<parameter name="', '">'),
    value=("", "</parameter>"),
)
_DSML_SECTION = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
_DSML_V4_SECTION = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")
_DSML_TAGS = TagSyntax(
    sections=(_DSML_SECTION, _DSML_V4_SECTION),
    name=('<｜DSML｜invoke name="', '">'),
    end="</｜DSML｜invoke>",
    key=('<｜DSML｜parameter name="', '">'),
    value=("", "</｜DSML｜parameter>"),
    has_types=True,
)
QWEN_XML = ToolFormat(
    "qwen-xml",
    _QWEN_TAGS.parser,
    markers=HERMES.markers,
    call=("<tool_call>", "\n<function=", NAME, ">\n", ARGUMENTS, "</function>\n", "</tool_call>"),
    between=("\n",),
    tags=_QWEN_TAGS,
)
SEED = ToolFormat(
    "seed",
    _SEED_TAGS.parser,
    markers=_SEED_CALL,
    call=("<seed:tool_call>", "\n<function=", NAME, ">\n", ARGUMENTS, "</function>\n", "</seed:tool_call>"),
    between=("\n",),
    tags=_SEED_TAGS,
)
GLM = ToolFormat(
    "glm",
    _GLM_TAGS.parser,
    markers=(*HERMES.markers, *_GLM_ARGUMENTS),
    call=("<tool_call>", NAME, SPACE, ARGUMENTS, "</tool_call>"),
    between=(SPACE,),
    tags=_GLM_TAGS,
)


def _hy(name: str, suffix: str) -> ToolFormat:
    """Return Hunyuan 3's format; the tokens of the open models have a suffix."""
    section, call, key, value = (
        (f"<{tag}{suffix}>", f"</{tag}{suffix}>") for tag in ("tool_calls", "tool_call", "arg_key", "arg_value")
    )
    separator = f"<tool_sep{suffix}>"
    tags = TagSyntax(call=call, name=("", separator), key=key, value=value, sections=(section,))
    return ToolFormat(
        name,
        tags.parser,
        markers=(*section, *call, separator, *key, *value),
        call=(call[0], NAME, separator, SPACE, ARGUMENTS, call[1], SPACE),
        opening=(section[0], SPACE),
        closing=(section[1],),
        tags=tags,
    )


HY, HY_OPEN = _hy("hy3", ""), _hy("hy3-open", ":opensource")
MINIMAX = ToolFormat(
    "minimax-m2",
    _MINIMAX_TAGS.parser,
    markers=_MINIMAX_SECTION,
    call=('<invoke name="', NAME, '">\n', ARGUMENTS, "</invoke>\n"),
    opening=("<minimax:tool_call>", "\n"),
    closing=("</minimax:tool_call>",),
    tags=_MINIMAX_TAGS,
)
# DSML is a token within every tag, and no grammar can say that a text ends before the tag.
DEEPSEEK_V32 = ToolFormat(
    "deepseek-v3.2",
    _DSML_TAGS.parser,
    markers=("｜DSML｜", *_DSML_SECTION),
    call=('<｜DSML｜invoke name="', NAME, '">\n', ARGUMENTS, "</｜DSML｜invoke>\n"),
    opening=("<｜DSML｜function_calls>", "\n"),
    closing=("</｜DSML｜function_calls>",),
    tags=_DSML_TAGS,
    is_enforceable=False,
)
DEEPSEEK_V4 = replace(
    DEEPSEEK_V32,
    name="deepseek-v4",
    markers=("｜DSML｜", *_DSML_V4_SECTION),
    opening=("<｜DSML｜tool_calls>", "\n"),
    closing=("</｜DSML｜tool_calls>",),
)
_MINICPM_TAGS = TagSyntax(
    name=('<function name="', '">'),
    key=('<param name="', '">'),
    value=("", "</param>"),
    end="</function>",
    has_cdata=True,
)
MINICPM = ToolFormat(
    "minicpm5",
    _MINICPM_TAGS.parser,
    markers=('<function name="', "</function>"),
    call=('<function name="', NAME, '">', ARGUMENTS, "</function>"),
    between=("\n",),
    tags=_MINICPM_TAGS,
)


def _object_list(name: str, opening: str, closing: str) -> ToolFormat:
    """Return the format of a list of objects with name and arguments between two tags."""
    return ToolFormat(
        name,
        _always(tool_parsers.object_list(opening, closing)),
        markers=tuple(filter(None, (opening, closing))),
        call=_OBJECT,
        opening=(opening, "["),
        between=(", ",),
        closing=("]", *filter(None, (closing,))),
    )


NEMOTRON = _object_list("nemotron-v2", "<TOOLCALL>", "</TOOLCALL>")
APRIEL = _object_list("apriel", "<tool_calls>", "</tool_calls>")
PHI4, GRANITE = _object_list("phi-4", "<|tool_call|>", "<|/tool_call|>"), _object_list("granite-3", "<|tool_call|>", "")
MINIMAX_M1 = replace(
    APRIEL,
    name="minimax-m1",
    opening=("<tool_calls>", "\n"),
    between=("\n",),
    closing=("\n", "</tool_calls>"),
)
_APERTUS = ("<|tools_prefix|>", "<|tools_suffix|>")
APERTUS = ToolFormat(
    "apertus",
    _always(tool_parsers.named_objects(*_APERTUS)),
    markers=_APERTUS,
    call=('{"', NAME, '": ', ARGUMENTS, "}"),
    opening=("<|tools_prefix|>", "["),
    between=(", ",),
    closing=("]", "<|tools_suffix|>"),
)
_SOLAR = tuple(f"<|tool_call:{each}|>" for each in ("begin", "name", "args", "end"))
SOLAR = ToolFormat(
    "solar",
    _always(tool_parsers.solar),
    markers=("<|tool_calls|>", *_SOLAR, "<|calls|>"),
    call=(_SOLAR[0], "call", NUMBER, _SOLAR[1], NAME, _SOLAR[2], ARGUMENTS, _SOLAR[3]),
    opening=("<|tool_calls|>",),
)
GRANITE_20B = ToolFormat(
    "granite-20b",
    _always(tool_parsers.tagged_objects("<function_call>", "")),
    markers=("<function_call>",),
    call=("<function_call>", SPACE, *_OBJECT),
    between=(SPACE,),
)
_INTERNLM_CALL = ("<|action_start|>", "<|plugin|>")
INTERNLM = ToolFormat(
    "internlm2",
    _always(tool_parsers.tagged_objects("".join(_INTERNLM_CALL), "<|action_end|>")),
    markers=(*_INTERNLM_CALL, "<|action_end|>"),
    call=(*_INTERNLM_CALL, "\n", '{"name": "', NAME, '", "parameters": ', ARGUMENTS, "}", "<|action_end|>"),
)
_GIGACHAT_CALL = ("<|message_sep|>", "\n\nfunction call", "<|role_sep|>", "\n")
GIGACHAT = ToolFormat(
    "gigachat",
    _always(tool_parsers.tagged_objects("<|function_call|>", "")),
    markers=("<|function_call|>",),
    call=("<|function_call|>", *_OBJECT),
    max_calls=1,
)
GIGACHAT_3 = ToolFormat(
    "gigachat-3",
    _always(tool_parsers.tagged_objects("".join(_GIGACHAT_CALL), "")),
    markers=("<|message_sep|>", "<|role_sep|>"),
    call=(*_GIGACHAT_CALL, *_OBJECT),
    max_calls=1,
)


def _quoted_calls(name: str, opening: str, closing: str, quote: str) -> ToolFormat:
    """Return Gemma's format. Its arguments are not JSON, so no grammar enforces them."""
    return ToolFormat(
        name,
        _always(quoted_calls(opening, closing, quote)),
        markers=(opening, closing, quote),
        call=(opening, CALL, NAME, "{", ARGUMENTS, "}", closing),
        is_enforceable=False,
    )


GEMMA = _quoted_calls("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _quoted_calls("function-gemma", "<start_function_call>", "<end_function_call>", "<escape>")
_ACTION = ("<|START_ACTION|>", "<|END_ACTION|>")
COMMAND_R = ToolFormat(
    "command-r",
    _always(tool_parsers.object_list(*_ACTION)),
    markers=_ACTION,
    call=('{"tool_call_id": "', NUMBER, '", "tool_name": "', NAME, '", "parameters": ', ARGUMENTS, "}"),
    opening=("<|START_ACTION|>", "[\n    "),
    between=(",\n    ",),
    closing=("\n]", "<|END_ACTION|>"),
)
FUNCTIONARY = ToolFormat(
    "functionary",
    _always(tool_parsers.functionary),
    markers=("<function=", "</function>"),
    call=("<function=", NAME, ">", ARGUMENTS, "</function>"),
)


def _python_calls(name: str, opening: str, closing: str) -> ToolFormat:
    """Return the format of Python calls between two tags, which no grammar enforces."""
    return ToolFormat(
        name,
        lambda schemas: tool_parsers.python_list(opening, closing, frozenset(schemas)),
        markers=(opening, closing),
        call=(opening, NAME, "(", ARGUMENTS, ")", closing),
        is_enforceable=False,
    )


_LFM_CALLS = ("<|tool_call_start|>", "<|tool_call_end|>")
LFM2 = _python_calls("lfm2", *_LFM_CALLS)
OLMO = _python_calls("olmo3", "<function_calls>", "</function_calls>")
LFM2_JSON = ToolFormat(
    "lfm2-json",
    _always(tool_parsers.tagged_objects(*_LFM_CALLS)),
    markers=_LFM_CALLS,
    call=(_LFM_CALLS[0], SPACE, *_OBJECT, SPACE, _LFM_CALLS[1]),
    between=(SPACE,),
)
# A call ends the answer, so there is only one.
HARMONY = ToolFormat(
    "harmony",
    harmony,
    markers=MARKS,
    call=(CHANNEL, f"commentary to={FUNCTIONS}", NAME, " ", CONSTRAIN, "json", MESSAGE, ARGUMENTS),
    max_calls=1,
    text_opening=FINAL_PIECES,
)
FORMATS = {
    each.name: each
    for each in (
        *(HERMES, QWEN_XML, MISTRAL, MISTRAL_ARGS, DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32, DEEPSEEK_V4, KIMI),
        *(GLM, HY, HY_OPEN, MINIMAX, SEED, NEMOTRON, COMMAND_R, FUNCTIONARY, LFM2, LFM2_JSON, OLMO),
        *(MINICPM, APRIEL, MINIMAX_M1, PHI4, GRANITE, GRANITE_20B, APERTUS, SOLAR, GIGACHAT, GIGACHAT_3),
        *(INTERNLM, GEMMA, FUNCTION_GEMMA, HARMONY, LLAMA, PYTHONIC),
    )
}


def choose_format(setting: str, rendered: str) -> ToolFormat | None:
    """Return the format named by WEFT_TOOL_FORMAT, or the one that the template uses if that is `auto`.

    `rendered`: the answer that the template makes of PROBE. None: calls are not separated from text.
    """
    if setting == "none":
        return None
    if setting == "auto":
        # Several formats share a parser. The pieces of a call tell them apart.
        readable = [each for each in FORMATS.values() if each.reads_probe(rendered)]
        alike = [each for each in readable if each.is_written_in(rendered)]
        return next((each for each in (*alike, *readable) if each in alike or each.has_marker), None)
    if setting not in FORMATS:
        raise BadCheckpoint(f"WEFT_TOOL_FORMAT: {setting!r} is unknown; choose one of auto, none, {', '.join(FORMATS)}")
    return FORMATS[setting]
