"""Checks of request bodies: limits on the number of values, and fields that Weft does not implement.

Values are counted in the raw bytes, because Python objects take a hundred times the memory. A JSON body of 8 MB could
hold a million objects. A protobuf message of that size could hold four million empty messages, which would block the
interpreter for seconds.

Fields that would change the answer are rejected, not ignored. Each lists its neutral values, which clients send
habitually, and many name the field to use instead. Fields that change no answer (billing, provider choice, caching) and
unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from weft.errors import InvalidRequest

MAX_OBJECTS = 65_536
MAX_STRINGS = 262_144
# Levels of objects and lists. Some JSON writers and tree walkers fail at 250.
MAX_LEVELS = 128
MAX_FIELDS = 65_536
MAX_VARINT_BYTES = 10


def check_body(*texts: bytes) -> None:
    """Check all JSON texts of one request. Raises InvalidRequest.

    Numbers do not count: a prompt may be a million token ids.
    """
    if sum(map(_most, texts)) <= MAX_OBJECTS and sum(text.count(b'"') for text in texts) <= 2 * MAX_STRINGS:
        return  # nearly every body
    plain = [text.replace(b"\\\\", b"").replace(b'\\"', b"") for text in texts]
    _refuse(sum(text.count(b'"') // 2 for text in plain), MAX_STRINGS, "strings")
    # Count only braces outside strings.
    _refuse(sum(_most(b"".join(text.split(b'"')[::2])) for text in plain), MAX_OBJECTS, "objects or lists")


def check_depth(text: str | bytes, value: Any, field: str | None = None) -> None:
    """Raise InvalidRequest naming the field if `value`, parsed from `text`, is nested too deeply."""
    if may_be_deep(text) and (depth := depth_of(value)) > MAX_LEVELS:
        message = f"JSON nested {depth} levels deep, at most {MAX_LEVELS}"
        raise InvalidRequest(f"{field}: {message}" if field else f"the body is {message}", field, "invalid_value")


def may_be_deep(text: str | bytes) -> bool:
    """Quick test: most texts have fewer brackets than MAX_LEVELS."""
    brackets = ("{", "[") if isinstance(text, str) else (b"{", b"[")
    return sum(map(text.count, brackets)) > MAX_LEVELS  # type: ignore[arg-type]


def depth_of(value: Any) -> int:
    """Return the levels of nested objects and lists."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def _most(text: bytes) -> int:
    return max(text.count(b"{"), text.count(b"["))


def _refuse(count: int, limit: int, name: str) -> None:
    if count > limit:
        raise InvalidRequest(f"the body has {count} {name}, at most {limit}", None, "invalid_value")


def check_message(raw: bytes, kind: type[Message]) -> None:
    """Raise InvalidRequest if a message has too many fields. Malformed bytes are left to the parser."""
    if len(raw) // 2 <= MAX_FIELDS:
        return  # every field takes at least two bytes
    left = MAX_FIELDS
    waiting: list[tuple[Any, int, int]] = [(kind.DESCRIPTOR, 0, len(raw))]
    while waiting:
        descriptor, place, end = waiting.pop()
        while place < end:
            if (left := left - 1) < 0:
                raise InvalidRequest(f"the message has more than {MAX_FIELDS} fields", None, "invalid_value")
            tag, place = _varint(raw, place)
            start, place = _value(raw, place, tag & 7)
            field = descriptor.fields_by_number.get(tag >> 3)
            if field is not None and field.message_type is not None:
                waiting.append((field.message_type, start, min(place, end)))


def _value(raw: bytes, place: int, wire_type: int) -> tuple[int, int]:
    """Return start and end of a field's value."""
    match wire_type:
        case 0:
            return place, _varint(raw, place)[1]
        case 1 | 5:
            return place, place + (8 if wire_type == 1 else 4)
        case 2:
            size, start = _varint(raw, place)
            return start, start + size
    return place, place  # a group begins or ends


def _varint(raw: bytes, place: int) -> tuple[int, int]:
    """Return a number and the place after it."""
    value = shift = 0
    for byte in raw[place : place + MAX_VARINT_BYTES]:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, place + max(1, shift // 7)


Neutral = Mapping[str, tuple[Any, ...]]


def _by_name(*groups: tuple[str, tuple[Any, ...]]) -> Neutral:
    """Return the neutral values by field, from groups of fields that have the same ones."""
    return {name: values for names, values in groups for name in names.split()}


# SDKs put the fields of these objects at the top level.
WRAPPERS = ("extra_body", "options", "parameters", "sampling_params")
# For all APIs: fields of OpenAI, vLLM and SGLang; of Ollama, llama.cpp, TGI and their front ends; of hosted servers
# (OpenRouter, Groq, Mistral, DashScope, xAI).
EVERYWHERE: Neutral = _by_name(
    (
        "adapter_id audio cache_salt chat_template custom_logit_processor guided_whitespace_pattern lora_path "
        "max_new_tokens moderation prompt_embeds prompt_mode random_seed search_parameters thinking_budget "
        "thinking_config thinking_token_budget truncate truncate_prompt_tokens web_search_options",
        (),
    ),
    (
        "continue_final_message decoder_input_details early_stopping echo enable_search include_stop_str_in_output "
        "no_stop_trim penalize_nl return_full_text return_hidden_states return_tokens_as_token_ids safe_prompt "
        "use_beam_search watermark",
        (False,),
    ),
    (
        "dry_multiplier dynatemp_range epsilon_cutoff eta_cutoff min_new_tokens mirostat mirostat_mode n_probs "
        "no_repeat_ngram_size smoothing_factor top_a xtc_probability",
        (0,),
    ),
    (
        "allowed_token_ids bad_words documents functions images logits_processors lora plugins samplers transforms",
        ([],),
    ),
    ("best_of guidance_scale length_penalty num_beams num_return_sequences repeat_penalty tfs tfs_z typical_p", (1,)),
    (
        "add_generation_prompt do_sample include_reasoning separate_reasoning skip_special_tokens stream_reasoning",
        (True,),
    ),
    ("n_predict num_predict reasoning_budget thinking_budget_tokens", (-1,)),
    ("format negative_prompt suffix", ("",)),
    ("chat_template_args vllm_xargs", ({},)),
    ("function_call", ("none",)),
    ("modalities", (["text"],)),
    ("stop_regex", ([], "")),
    ("top_n_sigma", (-1, 0)),
    ("reasoning_format", ("parsed", "auto", "deepseek")),
    (" ".join(WRAPPERS), ({},)),
)
# Fields of the other two APIs.
OPENAI_CHAT: Neutral = {
    **EVERYWHERE,
    "instructions": ("",),
    "max_output_tokens": (),
    "output_config": ({},),
    "stop_sequences": ([],),
    "system": ("", []),
    "text": ({"format": {"type": "text"}},),
}
# No template renders a completion's prompt.
OPENAI_COMPLETION: Neutral = {
    **OPENAI_CHAT,
    "chat_template_kwargs": ({},),
    "enable_thinking": (),
    "max_completion_tokens": (),
    "messages": ([],),
    "reasoning": (),
    "reasoning_effort": (),
    "think": (),
    "thinking": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
# Fields of chat completions that the other two APIs would lose.
CHAT_ALONE: Neutral = {
    **EVERYWHERE,
    "add_special_tokens": (False,),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "n": (1,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
}
_CHATS = "/v1/chat/completions"
COMPLETION_INSTEAD = dict.fromkeys(
    ("chat_template_kwargs", "enable_thinking", "reasoning", "reasoning_effort", "think", "thinking"), _CHATS
)
# Chat completion fields to use instead, each with the fields that it replaces.
_REPLACES = {
    "enable_thinking": (
        "prompt_mode reasoning_budget thinking_budget thinking_budget_tokens thinking_config thinking_token_budget"
    ),
    "max_tokens": "max_completion_tokens max_new_tokens max_output_tokens n_predict num_predict",
    "model": "adapter_id lora lora_path",
    "response_format": "format output_config text",
    "a message of role system": "instructions system",
    "logprobs": "n_probs top_logprobs",
    "chat_template_kwargs": "chat_template_args",
    "prompt_logprobs": "decoder_input_details",
    "temperature": "do_sample",
    "tool_choice": "function_call",
    "tools": "functions",
    "min_tokens": "min_new_tokens",
    "n": "num_return_sequences",
    "seed": "random_seed",
    "repetition_penalty": "repeat_penalty",
    "echo": "return_full_text",
    "stop": "stop_sequences",
    _CHATS: "messages tool_choice tools",
}
INSTEAD = {field: instead for instead, fields in _REPLACES.items() for field in fields.split()}


def check_supported(fields: Mapping[str, Any], neutral_values: Neutral, own: Mapping[str, str] | None = None) -> None:
    """Raise InvalidRequest for the first field that asks for an unsupported feature.

    `own`: this API's replacements for fields, and its names for chat completion fields.
    """
    for name, value in fields.items():
        neutral = neutral_values.get(name)
        if neutral is None or value is None or any(value == accepted for accepted in neutral):
            continue
        raise InvalidRequest(f"{name} is not supported here{_advice(name, own or {})}", name, "unsupported_parameter")


def _advice(name: str, own: Mapping[str, str]) -> str:
    if name in WRAPPERS:
        return "; put its fields at the top of the body"
    replacement = INSTEAD.get(name, name)
    instead = own.get(name) or own.get(replacement, replacement)
    return "" if instead == name else f"; use {instead}"
