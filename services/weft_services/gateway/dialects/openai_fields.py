"""Field types of OpenAI requests: what each accepts, and what its error says. Pure functions, no model knowledge."""

from __future__ import annotations

import json
import re
from typing import Any

from weft.tokenizer import SPECIAL_TOKENS
from weft_services.gateway.dialects.body_limits import MAX_LEVELS, depth_of, may_be_deep
from weft_services.gateway.dialects.custom_tools import as_function_call

MAX_PROMPTS = 64
# both hold their text under their own name; a refusal is what an assistant once said
TEXT_PARTS = ("text", "refusal")
MAX_TOOLS = 1024
MAX_NAME_CHARS = 128
MAX_SESSION_CHARS = 256
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_TEMPLATE_KWARGS = 32
MAX_TEMPLATE_TEXT = 4096
TEMPLATE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)
# what the gateway itself gives to templates
RESERVED_KWARGS = frozenset(SPECIAL_TOKENS).union(
    "messages tools documents add_generation_prompt raise_exception strftime_now chat_template tokenize "
    "continue_final_message".split()
)

# What clients of other servers add to any of the three.
ADDED = (
    "min_p seed frequency_penalty presence_penalty repetition_penalty logit_bias min_tokens stop_token_ids ignore_eos "
    "chat_template_kwargs enable_thinking think structured_outputs guided_json guided_regex guided_grammar "
    "guided_choice json_schema regex ebnf grammar priority reject_if_busy session_id"
).split()


def as_stop_list(value: Any) -> Any:
    """`stop` may be one string or a list of them."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def as_whole(value: Any) -> Any:
    """A number without a fraction is an integer, however it is written."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def flatten_content(value: Any) -> str | None:
    """A message's content: a string, null, or a list of text parts, which are joined as they are."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("expected a string or a list of text parts")
    texts = []
    for position, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            raise ValueError(f"part {position}: this model reads text parts only")
        if not isinstance(text := part.get(kind), str):
            raise ValueError(f"part {position}: {kind} must be a string")
        texts.append(text)
    return "".join(texts)


def check_prompt(value: Any, max_prompts: int = MAX_PROMPTS) -> list[str | tuple[int, ...]]:
    """A completion's prompt: a text, token ids, or a list of either. Always comes out as a list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("expected a string, a list of strings, a list of token ids or a list of such lists")
    if all(type(item) is int for item in value):
        return [_check_ids(value)]
    if len(value) > max_prompts:
        raise ValueError(f"{len(value)} prompts, at most {max_prompts} in one request")
    return [_check_one_prompt(item) for item in value]


def _check_one_prompt(item: Any) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and all(type(token) is int for token in item):
        return _check_ids(item)
    raise ValueError("expected each prompt to be a string or a list of token ids")


def _check_ids(ids: list[int]) -> tuple[int, ...]:
    if not ids:
        raise ValueError("a prompt needs at least one token")
    return tuple(ids)


def check_logit_bias(value: Any) -> Any:
    """Token ids as JSON has them, in strings, to what is added to their logits."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ValueError("expected an object of token ids and numbers")
    if len(value) > MAX_BIASES:
        raise ValueError(f"{len(value)} entries, at most {MAX_BIASES}")
    biases = tuple(_check_bias(token, bias) for token, bias in value.items())
    if len(dict(biases)) < len(biases):
        raise ValueError("a token is named twice")
    return biases


def _check_bias(token: Any, bias: Any) -> tuple[int, float]:
    if not (isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) < 10):
        raise ValueError(f"{str(token)[:32]!r} is not a token id")
    if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
        raise ValueError(f"token {token}: the bias must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}")
    return int(token), float(bias)


def check_template_kwargs(value: Any) -> dict[str, Any]:
    """Plain values under names of the template's own; what the gateway gives to templates cannot be replaced."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    if len(value) > MAX_TEMPLATE_KWARGS:
        raise ValueError(f"{len(value)} entries, at most {MAX_TEMPLATE_KWARGS}")
    for name, entry in value.items():
        if not TEMPLATE_NAME.fullmatch(name) or name in RESERVED_KWARGS:
            raise ValueError(f"{name[:64]!r} is not a name that a request may give to the template")
        if not (entry is None or isinstance(entry, bool | int | float | str)):
            raise ValueError(f"{name} must be a string, a number, a boolean or null")
        if isinstance(entry, str) and len(entry) > MAX_TEMPLATE_TEXT:
            raise ValueError(f"{name} is longer than {MAX_TEMPLATE_TEXT} characters")
    return value


def check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool definition; handed to the template as the client wrote it."""
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        raise ValueError("only tools of type function and custom are known")
    _check_name(tool.get(kind), kind)
    return tool


def check_tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """An assistant's earlier call."""
    if call.get("type") == "custom":
        if not isinstance(_check_name(call.get("custom"), "custom").get("input"), str | None):
            raise ValueError("custom.input must be a string")
        return call
    function = _check_name(call.get("function"))
    if not isinstance(function.get("arguments"), str | dict | None):
        raise ValueError("function.arguments must be a string")
    return call


def templated_call(call: dict[str, Any]) -> dict[str, Any]:
    """A checked call with arguments that are a JSON object as one, as chat templates expect."""
    call = as_function_call(call)
    function = call["function"]
    return {**call, "function": {**function, "arguments": _parse_arguments(function.get("arguments") or "")}}


def _parse_arguments(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments  # models do write broken JSON, and clients send it back
    if may_be_deep(arguments) and depth_of(parsed) > MAX_LEVELS:
        return arguments  # more than templates can walk through
    return parsed if isinstance(parsed, dict) else arguments


def _check_name(function: Any, kind: str = "function") -> dict[str, Any]:
    if not isinstance(function, dict):
        raise ValueError(f"{kind} must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS:
        raise ValueError(f"{kind}.name must be a string of 1 to {MAX_NAME_CHARS} characters")
    return function


def session_hint(*candidates: Any) -> str:
    """The first usable session id; it is a hint, so what cannot be used is passed over in silence."""
    for candidate in candidates:
        if isinstance(candidate, str) and 1 <= len(candidate) <= MAX_SESSION_CHARS:
            return candidate
    return ""
