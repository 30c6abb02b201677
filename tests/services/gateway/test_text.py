"""Detokenizing, stop strings and chat templates, against slow oracles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from tests.services.gateway.conftest import END, TEMPLATE, tiny_tokenizer
from weft.errors import InvalidRequest
from weft_services.gateway.generation import Conversation
from weft_services.gateway.text.chat_template import ChatTemplate
from weft_services.gateway.text.codec import MAX_WINDOW, Codec, Detokenizer, WindowDetokenizer

NANO = Path(__file__).parents[3] / "models" / "weft-nano"
TINY = Codec(tiny_tokenizer())
CODECS = [TINY, Codec(Tokenizer.from_file(str(NANO / "tokenizer.json")))]
Make = Callable[[Codec], Detokenizer]
WAYS: list[Make] = [Codec.detokenizer, lambda codec: WindowDetokenizer(codec.decode)]
every_way = pytest.mark.parametrize("make", WAYS, ids=["bytes", "window"])


def in_groups(items: list[int], sizes: list[int]) -> list[list[int]]:
    """Cut a list into groups of these sizes, over and over."""
    groups: list[list[int]] = []
    at = 0
    while at < len(items):
        size = sizes[len(groups) % len(sizes)]
        groups.append(items[at : at + size])
        at += size
    return groups


@every_way
@pytest.mark.parametrize("codec", CODECS, ids=["tiny", "nano"])
@given(text=st.text(max_size=60), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_pieces_of_text_join_to_the_whole(make: Make, codec: Codec, text: str, sizes: list[int]) -> None:
    ids = list(codec.encode(text, add_special_tokens=False))
    detokenizer = make(codec)
    pieces = [detokenizer.push(group) for group in in_groups(ids, sizes)]
    assert "".join(pieces) + detokenizer.flush() == codec.decode(ids)


@every_way
@pytest.mark.parametrize("codec", [*CODECS, TINY.with_visible_tokens([2])], ids=["tiny", "nano", "speaking"])
@given(ids=st.lists(st.integers(0, 325), max_size=120), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_any_tokens_even_broken_utf8_join_to_the_whole(
    make: Make, codec: Codec, ids: list[int], sizes: list[int]
) -> None:
    detokenizer = make(codec)
    pieces = [detokenizer.push(group) for group in in_groups(ids, sizes)]
    assert "".join(pieces) + detokenizer.flush() == codec.decode(ids)


@every_way
def test_a_character_comes_out_whole_and_not_before_it_is_complete(make: Make) -> None:
    ids = TINY.encode("a🙂é", add_special_tokens=False)
    assert len(ids) == 7  # the tiny vocabulary spells these bytes one by one
    detokenizer = make(TINY)
    assert [detokenizer.push([token]) for token in ids] == ["a", "", "", "", "🙂", "", "é"]


@pytest.mark.parametrize("token", ["<|im_end|>", "\u0122"], ids=["special", "broken byte"])
def test_the_window_stays_small_whatever_is_generated(token: str) -> None:
    decoded: list[int] = []

    def decode(ids: Any) -> str:
        decoded.append(len(ids))
        return TINY.decode(ids)

    detokenizer = WindowDetokenizer(decode)
    token_id = tiny_tokenizer().token_to_id(token) or 0
    for _ in range(1000):
        detokenizer.push([token_id])
    assert max(decoded) <= MAX_WINDOW + 1


TOOLS = [
    {
        "type": "function",
        "function": {"name": "lookup", "description": 'é <b> & "q"', "parameters": {"b": 1, "a": [None, True]}},
    }
]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "naïve <tag> & 'x' 🙂\n\n  y"}],
    [
        {"role": "user", "content": "call it"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "lookup", "arguments": {"k": "ü<"}}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ],
]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["short", "unicode", "tool calls"])
@pytest.mark.parametrize("source", [TEMPLATE, (NANO / "chat_template.jinja").read_text()], ids=["tiny", "nano"])
def test_templates_render_as_transformers_renders_them(source: str, messages: list[dict[str, Any]], tools: Any) -> None:
    special: dict[str, Any] = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
    rendered = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=source, add_generation_prompt=True, **special
    )
    ours = ChatTemplate(source, special).render(Conversation(tuple(messages), tuple(tools or ())))
    assert ours == rendered[0][0]


@pytest.mark.parametrize(("aside", "role"), [("", "system"), ("{# system or developer #}", "developer")])
def test_a_developer_is_the_system_where_a_template_knows_no_developers(aside: str, role: str) -> None:
    template = ChatTemplate("{{ messages[0].role }}" + aside, {})
    assert template.render(Conversation(({"role": "developer", "content": "x"},))) == role


def test_a_template_that_loops_runs_out_of_fuel() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", {})
    with pytest.raises(InvalidRequest, match="ran out of fuel"):
        template.render(Conversation(()))


def test_a_token_has_its_bytes_even_when_it_is_half_a_character() -> None:
    ids = TINY.encode("é", add_special_tokens=False)
    assert b"".join(TINY.token_bytes(token) for token in ids) == "é".encode()
    assert TINY.token_bytes(END) == b"<|im_end|>"
