"""The tool call formats by name: how to recognize, parse and write each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.errors import BadCheckpoint
from weft_services.gateway.text import tool_parsers
from weft_services.gateway.text.parts import Parser, new_call_id, new_short_id
from weft_services.gateway.text.xml_calls import Schemas, qwen_xml

# placeholders in the template of a call
NAME, ARGUMENTS, SPACE, NUMBER = "\0name", "\0arguments", "\0space", "\0number"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format. `call` is the template of one call, `opening` and `closing` surround all calls.

    `markers`: strings that may be single tokens. `is_xml`: arguments are tags, not JSON; see `xml_calls`.
    `ends_thoughts`: markers that end thoughts as `</think>` does.
    """

    name: str
    parser: Callable[[Schemas], Parser]
    markers: tuple[str, ...]
    call: tuple[str, ...]
    opening: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    new_id: Callable[[], str] = new_call_id
    is_xml: bool = False
    ends_thoughts: tuple[str, ...] = ()


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
QWEN_XML = ToolFormat(
    "qwen-xml",
    qwen_xml,
    markers=HERMES.markers,
    call=("<tool_call>", "\n<function=", NAME, ">\n", ARGUMENTS, "</function>\n", "</tool_call>"),
    between=("\n",),
    is_xml=True,
)
FORMATS = {
    each.name: each for each in (HERMES, QWEN_XML, MISTRAL, MISTRAL_ARGS, DEEPSEEK_V3, DEEPSEEK_V31, KIMI, LLAMA)
}


def choose_format(setting: str, template: str) -> ToolFormat | None:
    """Return the format named by WEFT_TOOL_FORMAT, or the one that the template uses if that is `auto`.

    None: calls are not separated from text.
    """
    if setting == "none":
        return None
    if setting != "auto":
        if setting not in FORMATS:
            raise BadCheckpoint(
                f"WEFT_TOOL_FORMAT: {setting!r} is unknown; choose one of auto, none, {', '.join(FORMATS)}"
            )
        return FORMATS[setting]
    return _by_template(template)


def _by_template(template: str) -> ToolFormat | None:
    if _SEEK[0] in template:
        return DEEPSEEK_V3 if "```json" in template else DEEPSEEK_V31
    if _KIMI[0] in template:
        return KIMI
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template and "<arg_key>" not in template:
        return QWEN_XML if "<function=" in template else HERMES
    is_llama = "<|python_tag|>" in template or "<|python_start|>" in template or '"parameters": ' in template
    return LLAMA if is_llama and "tools" in template else None
