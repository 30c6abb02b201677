"""Jinja's constructs, one by one, as transformers renders them: by minijinja, and by Jinja what that cannot do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.services.gateway.conftest import tiny_tokenizer, write_model
from weft.errors import BadCheckpoint, InvalidRequest, ModelFailed
from weft_services.gateway.generation import Conversation
from weft_services.gateway.model import load_model
from weft_services.gateway.text.chat_template import ChatTemplate

ARGUMENTS = {"a": 1.0, "b": None, "c": [True, "x"]}
CALL = {"id": "call00001", "type": "function", "function": {"name": "now", "arguments": ARGUMENTS}}
USER: dict[str, Any] = {"role": "user", "content": "hi there"}
MESSAGES: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "noon"},
    {"role": "user", "content": "bye"},
]
# one a line, with ⏎ for a line's end
CONSTRUCTS = (Path(__file__).parent / "jinja_constructs.txt").read_text(encoding="utf-8").splitlines()


def by_transformers(source: str) -> str | None:
    """None: it fails."""
    try:
        rendered = render_jinja_template(conversations=[MESSAGES], chat_template=source, add_generation_prompt=True)
    except Exception:  # the template's own, a TypeError, an UndefinedError, ...
        return None
    return str(rendered[0][0])


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_constructs_render_as_transformers_renders_them(construct: str) -> None:
    source = construct.replace("⏎", "\n")
    expected = by_transformers(source)
    if expected is None:
        with pytest.raises((BadCheckpoint, InvalidRequest, ModelFailed)):
            ChatTemplate(source, {}).render(Conversation(tuple(MESSAGES)))
    else:
        assert ChatTemplate(source, {}).render(Conversation(tuple(MESSAGES))) == expected


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("\n{{ 'a b'.nosuch() }}", "line 2: 'str object' has no attribute 'nosuch'"),
        ("\n\n{{ nosuch('x') }}", "line 3: 'nosuch' is undefined"),
        ("{% if true %}{{ 'a'|nosuch }}{% endif %}", "line 1: No filter named 'nosuch' found."),
        ("{{ 'a' + 1 }}", "line 1: can only concatenate str"),
        ("{{ 'a' * 10 ** 9 }}", "too large"),
        ("{{ 'a'.rsplit() }}" + "{% for i in range(9999) %}" * 2 + "{% endfor %}" * 2, "loop iterations"),
    ],
)
def test_a_fault_of_the_template_is_the_servers(source: str, said: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(ModelFailed) as failure:
        template.render(Conversation((USER,)))
    assert said in str(failure.value)
    assert failure.value.http_status == 500


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        # Jinja has to render both
        "{{ 'a'.rsplit() }}{{ raise_exception('roles must alternate') }}",
    ],
)
def test_a_refusal_by_the_template_is_the_clients(source: str) -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as refusal:
        ChatTemplate(source, {}).render(Conversation((USER,)))
    assert refusal.value.param == "messages"


def test_a_template_that_stumbles_over_one_text_is_a_refusal() -> None:
    template = ChatTemplate("{{ messages[0].content|int + messages[0].content.index('x') }}", {})
    assert template.render(Conversation(({"role": "user", "content": "x"},))) == "0"
    with pytest.raises(InvalidRequest, match="substring not found"):
        template.render(Conversation((USER,)))


@pytest.mark.parametrize("source", ["\n{{ 'a'|nosuch }}", "\n{{ x is nosuch }}", "\n{% endfor %}"])
def test_a_template_that_does_not_compile_names_its_line(source: str) -> None:
    with pytest.raises(BadCheckpoint, match="line 2: "):
        ChatTemplate(source, {})


def test_load_warns_of_what_a_template_cannot_render(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = "{% for m in messages if m.role == 'tool' %}\n{{ m.content.nosuch() }}{% endfor %}"
    load_model(write_model(tmp_path, tiny_tokenizer(), source), "m")
    (record,) = (each for each in caplog.records if each.levelno == logging.WARNING)
    assert "chat template fails model=m conversation='calls'" in record.getMessage()
    assert "line 2: 'str object' has no attribute 'nosuch'" in record.getMessage()


def test_load_refuses_a_template_that_fails_at_a_question(tmp_path: Path) -> None:
    place = write_model(tmp_path, tiny_tokenizer(), "\n{{ messages[0].content.nosuch() }}")
    with pytest.raises(BadCheckpoint, match="line 2: 'str object' has no attribute 'nosuch'"):
        load_model(place, "m")


@pytest.mark.parametrize("source", ["{{ raise_exception('a system message first') }}", "{{ messages[0].content }}"])
def test_load_takes_a_template_that_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str) -> None:
    load_model(write_model(tmp_path, tiny_tokenizer(), source), "m")
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_load_warns_of_an_eos_token_that_is_no_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = write_model(tmp_path, tiny_tokenizer(), "{{ messages[0].content }}")
    (place / "tokenizer_config.json").write_text('{"eos_token": "<nosuch>"}')
    load_model(place, "m")
    assert "eos_token='<nosuch>'" in caplog.text
