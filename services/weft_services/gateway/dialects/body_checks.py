"""Checks of request bodies: limits on the number of values, and fields that Weft does not implement.

Values are counted in the raw bytes, because Python objects take a hundred times the memory. A JSON body of 8 MB could
hold a million objects. A protobuf message of that size could hold four million empty messages, which would block the
interpreter for seconds.

Fields that would change the answer are rejected, not ignored. Each lists its neutral values, which clients send
habitually, and many name the field to use instead. Fields that change no answer (billing, provider choice, caching) and
unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from weft.errors import InvalidRequest

MAX_OBJECTS = 65_536
MAX_STRINGS = 262_144
# Levels of objects and lists. Some JSON writers and tree walkers fail at 250.
MAX_LEVELS = 128
MAX_FIELDS = 65_536
# 32-bit numbers, most of them in packed lists. A JSON body has space for as many.
MAX_NUMBERS = 4 * 1024 * 1024
MAX_VARINT_BYTES = 10
# Bytes with the continuation bit of a varint.
UNFINISHED = bytes(range(0x80, 0x100))


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
    """Raise InvalidRequest for too many fields or numbers, or for bytes that are visibly not a message."""
    if len(raw) // 2 <= MAX_FIELDS:
        return  # every field takes at least two bytes
    left, numbers = MAX_FIELDS, MAX_NUMBERS
    waiting: list[tuple[Any, int, int]] = [(kind.DESCRIPTOR, 0, len(raw))]
    while waiting:
        descriptor, begin, end = waiting.pop()
        for number, start, after in _fields(raw, begin, end):
            if (left := left - 1) < 0:
                raise InvalidRequest(f"the message has more than {MAX_FIELDS} fields", None, "invalid_value")
            field = descriptor.fields_by_number.get(number)
            if field is None:
                continue
            if field.message_type is not None:
                waiting.append((field.message_type, start, after))
            elif field.cpp_type == FieldDescriptor.CPPTYPE_UINT32:
                numbers -= len(raw[start:after].translate(None, UNFINISHED))
        if numbers < 0:
            raise InvalidRequest(f"the message has more than {MAX_NUMBERS} numbers", None, "invalid_value")


def _fields(raw: bytes, place: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield each field's number with the start and end of its value."""
    while place < end:
        tag, place = _varint(raw, place)
        match tag & 7:
            case 0:
                _, after = _varint(raw, place)
            case 1:
                after = place + 8
            case 2:
                size, place = _varint(raw, place)
                after = place + size
            case 5:
                after = place + 4
            case _:
                after = place  # a group begins or ends
        if after > end:
            raise InvalidRequest("the message is cut off", None, "invalid_value")
        yield tag >> 3, place, after
        place = after


def _varint(raw: bytes, place: int) -> tuple[int, int]:
    value = 0
    for number, byte in enumerate(raw[place : place + MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * number
        if byte < 0x80:
            return value, place + number + 1
    raise InvalidRequest("the message has a number that does not end", None, "invalid_value")


Neutral = Mapping[str, tuple[Any, ...]]

# For all APIs: fields of OpenAI, vLLM and SGLang.
_OPENAI: Neutral = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": (),
    "modalities": (["text"],),
    "moderation": (),
    "no_stop_trim": (False,),
    "prompt_embeds": (),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "stop_regex": ([], ""),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
# Fields of Ollama, llama.cpp, TGI and their front ends.
_LOCAL: Neutral = {
    "adapter_id": (),
    "decoder_input_details": (False,),
    "do_sample": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "format": ("",),
    "guidance_scale": (1,),
    "images": ([],),
    "lora": ([],),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "negative_prompt": ("",),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_predict": (-1,),
    "num_return_sequences": (1,),
    "penalize_nl": (False,),
    "repeat_penalty": (1,),
    "return_full_text": (False,),
    "samplers": ([],),
    "smoothing_factor": (0,),
    "tfs": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "truncate": (),
    "typical_p": (1,),
    "watermark": (False,),
    "xtc_probability": (0,),
}
# Fields of hosted servers: OpenRouter, Groq, Mistral, DashScope, xAI.
_HOSTED: Neutral = {
    "enable_search": (False,),
    "plugins": ([],),
    "prompt_mode": (),
    "random_seed": (),
    "reasoning_budget": (-1,),
    "reasoning_format": ("parsed", "auto", "deepseek"),
    "safe_prompt": (False,),
    "search_parameters": (),
    "thinking_budget": (),
    "thinking_budget_tokens": (-1,),
    "thinking_config": (),
    "transforms": ([],),
}
# SDKs put the fields of these objects at the top level.
WRAPPERS = ("extra_body", "options", "parameters", "sampling_params")
EVERYWHERE: Neutral = {
    **_OPENAI,
    **_LOCAL,
    **_HOSTED,
    "chat_template_args": ({},),
    **dict.fromkeys(WRAPPERS, ({},)),
}
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
# Chat completion fields to use instead.
INSTEAD = {
    "adapter_id": "model",
    "chat_template_args": "chat_template_kwargs",
    "decoder_input_details": "prompt_logprobs",
    "do_sample": "temperature",
    "format": "response_format",
    "function_call": "tool_choice",
    "functions": "tools",
    "instructions": "a message of role system",
    "lora": "model",
    "lora_path": "model",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "messages": _CHATS,
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "output_config": "response_format",
    "prompt_mode": "enable_thinking",
    "random_seed": "seed",
    "reasoning_budget": "enable_thinking",
    "repeat_penalty": "repetition_penalty",
    "return_full_text": "echo",
    "stop_sequences": "stop",
    "system": "a message of role system",
    "text": "response_format",
    "thinking_budget": "enable_thinking",
    "thinking_budget_tokens": "enable_thinking",
    "thinking_config": "enable_thinking",
    "thinking_token_budget": "enable_thinking",
    "tool_choice": _CHATS,
    "tools": _CHATS,
    "top_logprobs": "logprobs",
}


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
