"""The chat template: the same bytes from transformers and from minijinja, and every turn a prefix of the next."""

import json
import random
from typing import Any

import minijinja
import pytest
from training.weft_nano.dialogues import make_dialogue
from training.weft_nano.entities import Source
from training.weft_nano.tokenizer import TEMPLATE, render
from transformers import PreTrainedTokenizerFast

Message = dict[str, Any]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find_room",
        "description": "Rooms with <width> & 'view', déjà vu",
        "parameters": {"type": "object", "properties": {"floor": {"type": "integer"}}, "required": ["floor"]},
    },
}


def call(arguments: object) -> Message:
    function = {"name": "find_room", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


CONVERSATIONS: dict[str, tuple[list[Message], list[dict[str, Any]] | None]] = {
    "one question": ([{"role": "user", "content": "Hi"}], None),
    "system first": ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], None),
    "developer first": ([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}], [TOOL]),
    "tools without a system": ([{"role": "user", "content": "Find <b>a</b> room & 'tea'"}], [TOOL, TOOL]),
    "bare schema": ([{"role": "user", "content": "Hi"}], [TOOL["function"]]),
    "arguments as a mapping": (
        [
            {"role": "user", "content": "Go"},
            call({"floor": 3, "note": "a < b & c > 'd' é", "x": None, "y": True, "z": 1.5}),
            {"role": "tool", "tool_call_id": "1", "content": '{"room": "A<1>"}'},
            {"role": "assistant", "content": "Room A."},
            {"role": "user", "content": "Thanks"},
        ],
        [TOOL],
    ),
    "arguments as text": ([{"role": "user", "content": "Go"}, call('{"floor":3}')], [TOOL]),
    "content left out": ([{"role": "user", "content": "Go"}, {"role": "assistant", "tool_calls": []}], None),
    "no arguments": ([{"role": "user", "content": "Go"}, call({})], [TOOL]),
    "content in parts": (
        [{"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]}],
        None,
    ),
    "late system": ([{"role": "user", "content": "Hi"}, {"role": "system", "content": "Stop."}], [TOOL]),
    "newlines and spaces": ([{"role": "user", "content": "  a\n\n b \n"}, {"role": "assistant", "content": ""}], None),
}


def render_with_minijinja(messages: list[Message], tools: list[dict[str, Any]] | None, is_open: bool) -> str:
    environment = minijinja.Environment(pycompat=True, trim_blocks=True, lstrip_blocks=True)
    return environment.render_str(TEMPLATE.read_text(), messages=messages, tools=tools, add_generation_prompt=is_open)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("is_open", [True, False])
def test_both_engines_render_the_same_bytes(tokenizer: PreTrainedTokenizerFast, name: str, is_open: bool) -> None:
    messages, tools = CONVERSATIONS[name]
    assert render_with_minijinja(messages, tools, is_open) == render(tokenizer, messages, tools, is_open)


def test_both_engines_agree_on_made_dialogues(tokenizer: PreTrainedTokenizerFast) -> None:
    source = Source(random.Random(3))
    for _ in range(10):
        dialogue = make_dialogue(source, 600)
        theirs = render(tokenizer, dialogue.messages, dialogue.tools)
        assert render_with_minijinja(dialogue.messages, dialogue.tools, False) == theirs


def test_a_whole_conversation_reads_as_documented(tokenizer: PreTrainedTokenizerFast) -> None:
    messages, tools = CONVERSATIONS["arguments as a mapping"]
    text = render(tokenizer, messages[:3], tools, is_open=True)
    assert text == (
        "<|im_start|>system\n"
        'To use a tool, answer <tool_call>{"name": ..., "arguments": {...}}</tool_call>\n'
        "<tools>\n" + json.dumps(TOOL["function"], ensure_ascii=False) + "\n</tools><|im_end|>\n"
        "<|im_start|>user\nGo<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "find_room", "arguments": '
        """{"floor": 3, "note": "a < b & c > 'd' é", "x": null, "y": true, "z": 1.5}}</tool_call><|im_end|>\n"""
        '<|im_start|>tool\n<tool_response>{"room": "A<1>"}</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def test_text_and_mapping_arguments_render_alike(tokenizer: PreTrainedTokenizerFast) -> None:
    arguments = {"floor": 3, "name": "Zoë"}
    user = {"role": "user", "content": "Go"}
    texts = {render(tokenizer, [user, call(a)], [TOOL]) for a in (arguments, json.dumps(arguments, ensure_ascii=False))}
    assert len(texts) == 1


def test_every_turn_is_a_token_prefix_of_the_longer_conversation(tokenizer: PreTrainedTokenizerFast) -> None:
    source = Source(random.Random(4))
    for _ in range(8):
        dialogue = make_dialogue(source, 500)
        messages, tools = dialogue.messages, dialogue.tools
        whole = tokenizer(render(tokenizer, messages, tools)).input_ids
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = render(tokenizer, messages[:index], tools, is_open=True)
            turn = render(tokenizer, messages[: index + 1], tools)
            answer = turn.removeprefix(prompt).removesuffix("\n")
            assert answer.endswith("<|im_end|>")
            # What a server holds in its cache: the prompt's tokens, then the answer's, each encoded apart.
            held = tokenizer(prompt).input_ids + tokenizer(answer).input_ids
            assert whole[: len(held)] == held


def test_the_tokenizer_adds_no_token_by_itself(tokenizer: PreTrainedTokenizerFast) -> None:
    with_specials = tokenizer("Hello there.").input_ids
    assert with_specials == tokenizer("Hello there.", add_special_tokens=False).input_ids
