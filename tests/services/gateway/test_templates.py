"""Chat templates of real models, byte for byte as transformers renders them, for conversations of every kind.

`WEFT_TEMPLATE_EXAMPLES=500` tries more of them.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from weft.errors import InvalidRequest, ModelFailed
from weft_services.gateway.dialects.anthropic_requests import parse_messages
from weft_services.gateway.dialects.openai_requests import parse_chat
from weft_services.gateway.generation import Conversation
from weft_services.gateway.text.chat_template import ChatTemplate

TEMPLATES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
EXAMPLES = int(os.environ.get("WEFT_TEMPLATE_EXAMPLES", "20"))
SPECIAL: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
Message = dict[str, Any]
# of several system messages these render one
LOSE_SYSTEMS = ("deepseek-r1-distill-qwen-32b", "smollm3-3b")

# what templates look for in texts, what Jinja or HTML would take for its own, and anything
TEXTS = st.one_of(
    st.sampled_from(
        [
            "",
            " two \n\n lines\n",
            "<think>\nhm\n</think>\n\nyes",
            "no</think>yes",
            "<tool_response>x</tool_response>",
            "/no_think",
            "{{ messages }} {% if %}",
            "naïve <b> & \"q\" 'x' 🙂",
        ]
    ),
    # Python takes four separators for white space that Rust leaves where they are, and minijinja's strip() is Rust's
    st.text(st.characters(codec="utf-8", exclude_characters="\x1c\x1d\x1e\x1f"), max_size=12),
)
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
SCHEMAS = st.fixed_dictionaries(
    {"type": st.just("object")},
    optional={
        "properties": st.dictionaries(
            NAMES,
            st.fixed_dictionaries(
                {"type": st.sampled_from(["string", "integer", "object", ["number", "null"]])},
                optional={"description": TEXTS, "enum": st.lists(TEXTS, max_size=2), "default": VALUES},
            ),
            max_size=3,
        ),
        "required": st.lists(NAMES, max_size=2),
        "additionalProperties": st.booleans(),
    },
)
TOOLS = st.lists(
    st.builds(
        lambda function: {"type": "function", "function": function},
        st.fixed_dictionaries(
            {"name": NAMES, "description": TEXTS, "parameters": SCHEMAS}, optional={"strict": st.booleans()}
        ),
    ),
    max_size=2,
)
KWARGS = st.fixed_dictionaries({}, optional={"enable_thinking": st.booleans(), "thinking": st.booleans()})


# an object, or what a model wrote instead
ARGUMENTS = st.dictionaries(NAMES, VALUES, max_size=3).map(json.dumps) | st.just('{"x": ')
PARTS = st.lists(TEXTS.map(lambda text: {"type": "text", "text": text}), max_size=2)


@st.composite
def exchanges(draw: st.DrawFn) -> list[Message]:
    """A question, and what came of it: an answer, or calls, their results and an answer to these."""
    messages: list[Message] = [{"role": "user", "content": draw(TEXTS | PARTS)}]
    thoughts = st.fixed_dictionaries({}, optional={"reasoning_content": TEXTS})
    for _ in range(draw(st.integers(0, 2))):
        # nine letters and digits, as Mistral's templates want them
        ids = [f"call{draw(st.integers(0, 99999)):05}" for _ in range(draw(st.integers(1, 2)))]
        calls = [
            {"id": each, "type": "function", "function": {"name": draw(NAMES), "arguments": draw(ARGUMENTS)}}
            for each in ids
        ]
        messages.append({"role": "assistant", "content": draw(TEXTS), "tool_calls": calls, **draw(thoughts)})
        messages += [{"role": "tool", "content": draw(TEXTS | PARTS), "tool_call_id": each} for each in ids]
    if draw(st.booleans()):
        messages.append({"role": "assistant", "content": draw(TEXTS | PARTS), **draw(thoughts)})
    return messages


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Bodies of chat completions: turns in the order that templates know, now and then in another."""
    messages = [{"role": "system", "content": draw(TEXTS)}] if draw(st.booleans()) else []
    messages += [each for exchange in draw(st.lists(exchanges(), min_size=1, max_size=3)) for each in exchange]
    if not draw(st.integers(0, 7)):
        messages = draw(st.permutations(messages))
    tools = draw(TOOLS)
    return {"messages": messages, "chat_template_kwargs": draw(KWARGS), **({"tools": tools} if tools else {})}


def for_transformers(message: Message) -> Message:
    """As its users write messages: text is text, arguments are objects where they can be."""
    message = dict(message)
    if isinstance(message["content"], list):
        message["content"] = "".join(part["text"] for part in message["content"])
    if "tool_calls" in message:
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _read(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return message


def texts_of(body: dict[str, Any], role: str) -> list[str]:
    """What one role says."""
    return [for_transformers(each)["content"] for each in body["messages"] if each["role"] == role]


def _read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def as_transformers_renders(source: str, body: dict[str, Any]) -> str | None:
    """None: the template refuses. What it stumbles over itself is no example."""
    try:
        rendered = render_jinja_template(
            conversations=[[for_transformers(message) for message in body["messages"]]],
            tools=body.get("tools"),
            chat_template=source,
            add_generation_prompt=True,
            **SPECIAL,
            **body["chat_template_kwargs"],
        )
    except (jinja2.UndefinedError, TypeError, AttributeError, RecursionError):
        assume(False)
    except jinja2.TemplateError:
        return None
    return str(rendered[0][0])


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=EXAMPLES, deadline=None)
@given(body=requests())
def test_templates_render_as_transformers_renders_them(name: str, body: dict[str, Any]) -> None:
    expected = as_transformers_renders(TEMPLATES[name], body)
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    (asked,) = parse_chat(json.dumps({"model": name, **body}).encode()).prompts
    assert isinstance(asked, Conversation)
    is_lost = name in LOSE_SYSTEMS and any(each["role"] == "system" for each in body["messages"][1:])
    if expected is not None and not is_lost:
        assert template.render(asked) == expected
    elif is_lost:
        assert all(text.strip() in template.render(asked) for text in texts_of(body, "system"))
    else:  # `test_history_rewrite` tells what is rendered all the same
        with suppress(InvalidRequest, ModelFailed):
            assert all(text.strip() in template.render(asked) for text in texts_of(body, "user"))


USER = {"role": "user", "content": "hi"}
BARE = {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}}


def call(**arguments: Any) -> Message:
    function = {"name": "now", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "call00001", "function": function}]}


@pytest.mark.parametrize(
    ("name", "messages", "tools"),
    [
        # `tools is iterable and tools | length > 0`: none is not iterable
        ("qwen3-coder", [USER], []),
        # `properties | length == 0` where there are none
        ("hermes-3-llama-3.1-8b-tool-use", [USER], [BARE]),
        # arguments one by one: numbers as Python writes them, not as Rust does
        ("qwen3-coder", [USER, call(a=2.0, b=1e-7, c=1e22, d=123456789012345680.0, e=2**64 - 1, f=True, g=None)], []),
        ("qwen3-coder", [USER, call(a=[2.0, {"b": 1e22}], b={"c": 1e-7})], [BARE]),
    ],
)
def test_jinjas_ways_are_kept_where_minijinja_has_its_own(name: str, messages: list[Message], tools: list[Any]) -> None:
    source = TEMPLATES[name]
    rendered = render_jinja_template(
        conversations=[messages], tools=tools or None, chat_template=source, add_generation_prompt=True, **SPECIAL
    )
    assert ChatTemplate(source, SPECIAL).render(Conversation(tuple(messages), tuple(tools))) == rendered[0][0]


def test_documents_are_none_where_there_are_none() -> None:
    source = "{% if documents is not none %}{{ documents }}{% endif %}{{ documents is defined }}"
    expected = render_jinja_template(conversations=[[USER]], chat_template=source)
    assert ChatTemplate(source, {}).render(Conversation((USER,))) == expected[0][0] == "True"


def test_tags_around_what_a_model_is_trained_to_say_write_nothing() -> None:
    source = (
        "{%- for message in messages -%}\n  {% if message.role == 'user' %}\n<{{ message.content }}>\n  {% else %}\n"
        "    {% generation %}\n{% set said = message.content %}[{{ said }}]{%- endgeneration -%}\n\n  "
        "{%+ generation -%}  {{ said is defined }}\n {% endgeneration +%}  |\n{% endif %}\n{%- endfor %}"
    )
    messages = [USER, {"role": "assistant", "content": "a"}, USER]
    expected = render_jinja_template(conversations=[messages], chat_template=source, **SPECIAL)
    template = ChatTemplate(source, SPECIAL)
    assert template.render(Conversation(tuple(messages), is_open=False)) == expected[0][0]


def test_a_fault_of_minijinja_is_rendered_by_jinja() -> None:
    """It panics at this slice."""
    rendered = ChatTemplate("{{ tools[1:][::-1] }}", {}).render(Conversation((USER,), (BARE,)))
    assert rendered == "[]"


@pytest.mark.parametrize("content", [None, "I look."])
def test_a_template_that_puts_arguments_between_other_text_gets_them_as_text(content: str | None) -> None:
    """As DeepSeek publishes its own."""
    function = {"name": "now", "arguments": '{"city": "Rome", "é": 1.0}'}
    called: Message = {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }
    messages = [USER, called, {"role": "tool", "tool_call_id": "a", "content": "noon"}]
    name = "deepseek-v3"
    expected = render_jinja_template(
        conversations=[messages], chat_template=TEMPLATES[name], add_generation_prompt=True, **SPECIAL
    )
    (asked,) = parse_chat(json.dumps({"model": name, "messages": messages}).encode()).prompts
    assert isinstance(asked, Conversation)
    assert ChatTemplate(TEMPLATES[name], SPECIAL).render(asked) == expected[0][0]
    assert content is not None or function["arguments"] in expected[0][0]


def test_a_turn_of_calls_alone_is_one_in_anthropics_words_too() -> None:
    """Templates such as DeepSeek's tell by the missing content that nothing is said beside the calls."""
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "noon"}]
    used = {"type": "tool_use", "id": "a", "name": "now", "input": {}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "noon"}]}
    messages = [USER, {"role": "assistant", "content": [used]}, result]
    template = ChatTemplate(TEMPLATES["deepseek-r1-distill-qwen-32b"], SPECIAL)
    (by_chat,) = parse_chat(json.dumps({"model": "m", "messages": chat}).encode()).prompts
    (by_messages,) = parse_messages(json.dumps({"model": "m", "max_tokens": 1, "messages": messages}).encode()).prompts
    assert isinstance(by_chat, Conversation)
    assert isinstance(by_messages, Conversation)
    assert template.render(by_messages) == template.render(by_chat)


def test_thoughts_of_earlier_turns_have_both_names_that_templates_read() -> None:
    said = {"role": "assistant", "content": "noon", "reasoning_content": "I look."}
    body = {"model": "m", "messages": [USER, said, USER]}
    (asked,) = parse_chat(json.dumps(body).encode()).prompts
    assert isinstance(asked, Conversation)
    for name in ("thinking", "reasoning_content"):
        source = f"{{% for m in messages %}}[{{{{ m.{name} }}}}]{{% endfor %}}"
        assert ChatTemplate(source, SPECIAL).render(asked) == "[][I look.][]"
