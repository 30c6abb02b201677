"""Histories that agents and other servers leave behind, on chat templates of real models: rendered, with all words."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.services.gateway.test_templates import SPECIAL, TEMPLATES, Message
from weft.errors import InvalidRequest
from weft_services.gateway.dialects.anthropic_requests import parse_messages
from weft_services.gateway.dialects.openai_requests import parse_chat
from weft_services.gateway.dialects.responses_requests import parse_responses
from weft_services.gateway.generation import Conversation
from weft_services.gateway.text.chat_template import ChatTemplate
from weft_services.gateway.text.history_rewrite import SHORT_ID, short_id

# these know no calls, or are written for another engine's Jinja
WITHOUT_CALLS = ("kimi-k2-thinking", "llama-2-chat", "llama-3-8b-instruct", "mistral-v1", "smollm3-3b")
WITH_CALLS = sorted(TEMPLATES.keys() - set(WITHOUT_CALLS))
# templates of models that none of the packages ships, cut down to what they refuse or leave out
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + ALTERNATES
)
QWEN_35 = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}{% if 'user' not in messages | map(attribute='role') %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}"
)
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% endif %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
KIMI_IDS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_call_id %}{{ m.tool_call_id }}={% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.id }} {{ call.function.arguments | tojson }}){% endfor %}{% endfor %}"
)
FIRST_CALL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}{% set call = m.tool_calls[0] %}"
    "({{ call.function.name }} {{ call.function.arguments | tojson }}){% endif %}{% endfor %}"
)
ID, OTHER = "call_0123456789abcdef01234567", "toolu_01A09q90qw90lq917835lq9"


def say(role: str, text: str | None) -> Message:
    return {"role": role, "content": text}


def call(*ids: str | None, arguments: Any = '{"q": "argument"}', text: str | None = None) -> Message:
    calls = [
        {"id": each, "type": "function", "function": {"name": f"look{place}", "arguments": arguments}}
        for place, each in enumerate(ids)
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def result(call_id: str | None, text: Any) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


USER, SAID, MORE = say("user", "asked"), say("assistant", "said"), say("user", "more")
# what there is, and the words that have to be in the prompt in this order
TALKS: dict[str, tuple[list[Message], str]] = {
    "system later": ([say("system", "rule"), USER, SAID, say("system", "late"), MORE], "rule asked said late more"),
    "system later alone": ([USER, SAID, say("system", "late"), MORE], "asked said late more"),
    "developer later": (
        [say("developer", "rule"), USER, SAID, say("developer", "late"), MORE],
        "rule asked said late more",
    ),
    "system last": ([say("system", "rule"), USER, say("system", "late")], "rule asked late"),
    "two systems": ([say("system", "rule"), say("developer", "late"), USER], "rule late asked"),
    "system alone": ([say("system", "rule")], "rule"),
    "empty answer": ([USER, say("assistant", ""), MORE], "asked more"),
    "no answer": ([USER, say("assistant", None), MORE], "asked more"),
    "two users": ([USER, MORE], "asked more"),
    "two answers": ([USER, SAID, say("assistant", "again"), MORE], "asked said again more"),
    "answer first": ([SAID, MORE], "said more"),
    "answer alone": ([say("system", "rule"), SAID], "rule said"),
    "no calls": ([USER, {**SAID, "tool_calls": []}, MORE], "asked said more"),
    "white space behind": ([USER, say("assistant", "said \n\n"), MORE], "asked said more"),
}
CALLS: dict[str, tuple[list[Message], str]] = {
    "foreign id": ([USER, call(ID), result(ID, "found")], "asked argument found"),
    "two calls": (
        [USER, call(ID, OTHER), result(OTHER, "second"), result(ID, "first"), SAID, MORE],
        "asked argument argument said more",
    ),
    "no id": ([USER, call(None), result(None, "found")], "asked argument found"),
    "empty id": ([USER, call(""), result("", "found")], "asked argument found"),
    "long id": ([USER, call(ID * 20), result(ID * 20, "found")], "asked argument found"),
    "one id twice": ([USER, call("x", "x"), result("x", "first"), result("x", "second")], "asked argument"),
    "result alone": ([USER, result(ID, "found"), MORE], "asked found more"),
    "call alone": ([USER, call(ID), MORE], "asked argument more"),
    "user behind result": ([USER, call(ID), result(ID, "found"), MORE], "asked argument found more"),
    "system behind result": ([USER, call(ID), result(ID, "found"), say("system", "late")], "asked argument found late"),
    "text, then call": ([USER, SAID, call(ID), result(ID, "found"), MORE], "asked argument found more"),
    "broken arguments": ([USER, call(ID, arguments='{"q": "argument'), result(ID, "found")], "asked argument found"),
    "list as arguments": ([USER, call(ID, arguments='["argument"]'), result(ID, "found")], "asked argument found"),
    "object as arguments": ([USER, call(ID, arguments={"q": "argument"}), result(ID, "found")], "asked argument found"),
    "no arguments": ([USER, call(ID, arguments=None), result(ID, "found")], "asked look0 found"),
    "no result": ([USER, call(ID), result(ID, None), SAID, MORE], "asked argument said more"),
    "result in parts": ([USER, call(ID), result(ID, [{"type": "text", "text": "found"}])], "asked argument found"),
}


def conversation(messages: list[Message]) -> Conversation:
    (prompt,) = parse_chat(json.dumps({"model": "m", "messages": messages}).encode()).prompts
    assert isinstance(prompt, Conversation)
    return prompt


def rendered(source: str, messages: list[Message]) -> str:
    return ChatTemplate(source, SPECIAL).render(conversation(messages))


def assert_in_order(words: str, text: str) -> None:
    place = 0
    for word in words.split():
        assert word in text[place:], f"{word!r} is not in its place: {text}"
        place = text.index(word, place) + len(word)


@pytest.mark.parametrize("history", TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_talk_is_rendered_with_all_words(name: str, history: str) -> None:
    messages, words = TALKS[history]
    text = rendered(TEMPLATES[name], messages)
    if name.startswith("deepseek-v3") and "late" in words:  # collects what the system says, as transformers shows it
        assert set(words.split()) <= set(re.findall(r"rule|late|asked|said|more", text))
    elif name.startswith("deepseek-r1") and "late" in words and "rule" not in words:  # puts it first, as transformers
        assert_in_order(f"late {words.replace(' late', '')}", text)
    elif name.startswith("mistral-nemo") and words.startswith("rule"):  # writes it before the user's last words
        assert_in_order(words.removeprefix("rule "), text)
        assert "rule" in text or messages[-1] == SAID
    else:
        assert_in_order(words, text)


@pytest.mark.parametrize("history", CALLS)
@pytest.mark.parametrize("name", WITH_CALLS)
def test_calls_are_rendered_with_all_words(name: str, history: str) -> None:
    messages, words = CALLS[history]
    text = rendered(TEMPLATES[name], messages)
    is_first = name.startswith("deepseek") and "late" in words
    assert_in_order(words.replace(" late", "") if is_first else words, text)
    assert all(word in text for word in words.split())
    if history == "one id twice":
        assert_in_order("first second", text)


@pytest.mark.parametrize("name", ["llama-3.1-8b-instruct", "llama-3.2-3b-instruct", "llama-3.3-70b-instruct"])
def test_calls_are_split_for_templates_of_single_calls(name: str) -> None:
    calls = [call(ID)["tool_calls"][0], {**call(OTHER)["tool_calls"][0]}]
    for each in calls:
        each["function"] = {"name": "look", "arguments": {"q": each["id"]}}
    both = {"role": "assistant", "content": None, "tool_calls": calls}
    results = [result(OTHER, "second"), result(ID, "first")]
    apart = [USER, {**both, "tool_calls": calls[:1]}, results[1], {**both, "tool_calls": calls[1:]}, results[0], MORE]
    expected = render_jinja_template(
        conversations=[apart], chat_template=TEMPLATES[name], add_generation_prompt=True, **SPECIAL
    )
    assert rendered(TEMPLATES[name], [USER, both, *results, MORE]) == expected[0][0]


def test_later_calls_are_not_left_out() -> None:
    text = rendered(FIRST_CALL, [USER, call(ID, OTHER), result(OTHER, "second"), result(ID, "first"), MORE])
    assert_in_order("asked look0 first look1 second more", text)


@pytest.mark.parametrize("name", ["mistral-nemo-instruct-2407", "mistral-small-3.2-24b-instruct-2506"])
def test_foreign_ids_are_short_and_the_same_every_time(name: str) -> None:
    one, other = (result(each, text) for each, text in ((ID, "first"), (OTHER, "second")))
    whole = rendered(TEMPLATES[name], [USER, call(ID, OTHER), one, other])
    again = rendered(TEMPLATES[name], [say("user", "else"), call(OTHER), other])
    short, other_short = (short_id(each) for each in (ID, OTHER))
    assert whole.count(short) == whole.count(other_short) == again.count(other_short) == 2
    assert SHORT_ID.fullmatch(short)
    assert SHORT_ID.fullmatch(other_short)
    own = rendered(TEMPLATES[name], [USER, call("abcDEF123"), result("abcDEF123", "first")])
    assert own.count("abcDEF123") == 2


def test_ids_name_the_function_where_nothing_else_does() -> None:
    history = [USER, call(ID, OTHER), result(OTHER, "second"), result(ID, "first"), call(ID), result(ID, "third")]
    text = rendered(KIMI_IDS, history)
    assert re.findall(r"functions\.look\d:\d=?", text) == [
        *("functions.look0:0", "functions.look1:1", "functions.look1:1=", "functions.look0:0="),
        *("functions.look0:2", "functions.look0:2="),
    ]
    own = [USER, call("functions.look0:7"), result("functions.look0:7", "first")]
    assert rendered(KIMI_IDS, own).count("functions.look0:7") == 2


@pytest.mark.parametrize("source", [GEMMA, QWEN_35, FIRST_SYSTEM, ALTERNATES])
@pytest.mark.parametrize("history", TALKS)
def test_templates_of_other_models_take_talk(source: str, history: str) -> None:
    messages, words = TALKS[history]
    assert_in_order(words, rendered(source, messages))


def test_later_system_is_quoted_where_it_spoke() -> None:
    text = rendered(QWEN_35, [say("system", "rule"), USER, SAID, say("system", "late"), MORE])
    assert text == "<system>rule<user>asked<assistant>said<user><system>\nlate\n</system><user>more"


def test_what_is_taken_stays_as_it_is() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    messages = [SAID, say("system", "late"), USER, MORE, say("system", "later")]
    assert rendered(source, messages) == "<assistant>said<system>late<user>asked<user>more<system>later"


def test_refusal_of_everything_is_the_first_one() -> None:
    source = "{{ raise_exception(messages | length | string ~ ' are too many') }}"
    with pytest.raises(InvalidRequest, match="2 are too many"):
        rendered(source, [USER, MORE])


def test_begun_answer_is_continued_behind_what_was_changed() -> None:
    body = {"model": "m", "messages": [USER, MORE, say("assistant", "I thi")], "continue_final_message": True}
    (prompt,) = parse_chat(json.dumps(body).encode()).prompts
    assert isinstance(prompt, Conversation)
    assert ChatTemplate(GEMMA, SPECIAL).render(prompt) == "<user>asked\n\nmore<assistant>I thi"


def test_system_later_is_the_same_in_every_api() -> None:
    messages = [USER, SAID, say("system", "late"), MORE]
    expected = rendered(QWEN_35, messages)
    by_messages = parse_messages(json.dumps({"model": "m", "max_tokens": 1, "messages": messages}).encode())
    by_responses = parse_responses(json.dumps({"model": "m", "input": messages}).encode())
    for asked in (by_messages, by_responses):
        (prompt,) = asked.prompts
        assert isinstance(prompt, Conversation)
        assert ChatTemplate(QWEN_35, SPECIAL).render(prompt) == expected


@pytest.mark.parametrize("message", [say("user", None), {"role": "user"}, say("system", None), {"role": "tool"}])
def test_messages_of_others_need_content(message: Message) -> None:
    with pytest.raises(InvalidRequest, match="content is required"):
        conversation([USER, message])
