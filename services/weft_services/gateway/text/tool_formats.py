"""The tool call formats by name: how to recognize, parse and write each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from weft.errors import BadCheckpoint
from weft_services.gateway.generation import Conversation
from weft_services.gateway.text import tool_parsers
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
        first = (*self.opening, *self.call)[0]
        at = rendered.find(first if self.has_marker else first[:2])
        if at < 0 or (not self.has_marker and rendered[:at].rstrip().endswith("[")):  # a list of objects is no object
            return False
        buffer, parts = TextBuffer(), Parts(self.new_id)
        buffer.text, buffer.is_over = rendered[0 if self.has_marker else at :], True
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
    _always(tool_parsers.hermes),
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
_HY_SECTION = ("<tool_calls>", "</tool_calls>")
_HY_TAGS = replace(_GLM_TAGS, name=("", "<tool_sep>"), sections=(_HY_SECTION,))
_MINIMAX_SECTION = ("<minimax:tool_call>", "</minimax:tool_call>")
_MINIMAX_TAGS = TagSyntax(
    sections=(_MINIMAX_SECTION,),
    name=('<invoke name="', '">'),
    end="</invoke>",
    key=('<parameter name="', '">'),
    value=("", "</parameter>"),
)
_DSML_SECTION = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
_DSML_TAGS = TagSyntax(
    sections=(_DSML_SECTION, ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")),  # of V3.2 and V4
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
HY = ToolFormat(
    "hy3",
    _HY_TAGS.parser,
    markers=(*_HY_SECTION, *HERMES.markers, "<tool_sep>", *_GLM_ARGUMENTS),
    call=("<tool_call>", NAME, "<tool_sep>", SPACE, ARGUMENTS, "</tool_call>", SPACE),
    opening=("<tool_calls>", SPACE),
    closing=("</tool_calls>",),
    tags=_HY_TAGS,
)
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
NEMOTRON = ToolFormat(
    "nemotron-v2",
    _always(tool_parsers.object_list("<TOOLCALL>", "</TOOLCALL>")),
    markers=("<TOOLCALL>", "</TOOLCALL>"),
    call=_OBJECT,
    opening=("<TOOLCALL>", "["),
    between=(", ",),
    closing=("]", "</TOOLCALL>"),
)
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
_LFM_CALLS = ("<|tool_call_start|>", "<|tool_call_end|>")
LFM2 = ToolFormat(
    "lfm2",
    lambda schemas: tool_parsers.python_list(*_LFM_CALLS, frozenset(schemas)),
    markers=_LFM_CALLS,
    call=(NAME, "(", ARGUMENTS, ")"),
    opening=("<|tool_call_start|>", "["),
    between=(", ",),
    closing=("]", "<|tool_call_end|>"),
    is_enforceable=False,  # its arguments are Python
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
        *(HERMES, QWEN_XML, MISTRAL, MISTRAL_ARGS, DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32, KIMI),
        *(GLM, HY, MINIMAX, SEED, NEMOTRON, COMMAND_R, FUNCTIONARY, LFM2, HARMONY, LLAMA),
    )
}


def choose_format(setting: str, rendered: str) -> ToolFormat | None:
    """Return the format named by WEFT_TOOL_FORMAT, or the one that the template uses if that is `auto`.

    `rendered`: what the template makes of PROBE. None: calls are not separated from text.
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
