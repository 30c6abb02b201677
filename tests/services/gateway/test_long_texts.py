"""What is long, or goes on and on, is read in a time that grows with its length, and is held back for no longer than
something could still begin. Each of these would take minutes if it were copied for every piece that comes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.services.gateway.conftest import MODEL_NAME
from tests.services.gateway.test_tool_parsers import calls, read, said
from weft.request import FinishReason, PositionLogprobs, TokenLogprob
from weft_services.gateway.dialects.answers import CollectedChoice, Usage
from weft_services.gateway.dialects.anthropic_requests import parse_count
from weft_services.gateway.dialects.openai_requests import ChatBody
from weft_services.gateway.dialects.responses_encoder import ResponsesEncoder
from weft_services.gateway.dialects.responses_requests import parse_responses
from weft_services.gateway.dialects.token_requests import DetokenizeBody, TokenizeBody
from weft_services.gateway.generation import Conversation
from weft_services.gateway.mesh.choice_text import ChoiceUpdate
from weft_services.gateway.mesh.prepare import prepare
from weft_services.gateway.model import load_model
from weft_services.gateway.text.parts import MAX_SPACE, PartKind
from weft_services.gateway.text.tool_formats import FORMATS

SPACES = ["    " * 16] * 40_000


@pytest.mark.parametrize("name", ["hermes", "llama"])
@pytest.mark.parametrize(("thinks", "is_thinking"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("first", ["", "["])
def test_white_space_without_end_is_nothing_but_text(name: str, thinks: bool, is_thinking: bool, first: str) -> None:
    parts = read(FORMATS[name], [first, *SPACES, "x"], thinks, is_thinking)
    text = said(parts, PartKind.REASONING if is_thinking else PartKind.TEXT)
    assert text.replace(" ", "") == f"{first}x"
    assert not calls(parts)


def test_an_answer_that_comes_as_a_whole_may_have_any_number_of_arguments() -> None:
    written = "<function=add>" + "<parameter=city>Rome</parameter>\n" * 60_000 + "</function>"
    ((name, arguments),) = calls(read(FORMATS["qwen-xml"], [written]))
    assert (name, json.loads(arguments)) == ("add", {"city": "Rome"})
    assert arguments.count("Rome") == 60_000


@pytest.mark.parametrize("name", FORMATS)
def test_what_comes_after_very_much_space_begins_nothing_however_it_is_cut(name: str) -> None:
    for written in (" " * (MAX_SPACE + 1) + "<think>x</think>y", " " * MAX_SPACE + "<think>x</think>y"):
        whole, letters = read(FORMATS[name], [written], thinks=True), read(FORMATS[name], list(written), thinks=True)
        for kind in (PartKind.TEXT, PartKind.REASONING):
            assert said(whole, kind) == said(letters, kind)
        assert said(whole, PartKind.REASONING) == ("x" if len(written) == MAX_SPACE + 17 else "")


def test_what_many_systems_say_first_is_put_together_once() -> None:
    said_first = [{"role": "developer", "content": f"{number:0500}"} for number in range(50_000)]
    body = {"model": "m", "input": [*said_first, {"role": "user", "content": "x"}]}
    prompt = parse_responses(json.dumps(body).encode()).prompts[0]
    assert isinstance(prompt, Conversation)
    assert [message["role"] for message in prompt.messages] == ["developer", "user"]
    assert prompt.messages[0]["content"] == "\n\n".join(each["content"] for each in said_first)


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_what_is_said_in_very_many_messages_in_a_row_is_put_together_once(role: str) -> None:
    said_in_a_row = [{"role": role, "content": f"{number:0500}"} for number in range(60_000)]
    prompt = parse_count(json.dumps({"model": "m", "messages": said_in_a_row}).encode()).prompts[0]
    assert isinstance(prompt, Conversation)
    (message,) = prompt.messages
    assert message["content"] == "\n\n".join(each["content"] for each in said_in_a_row)


def test_a_whole_answer_with_logprobs_may_have_any_number_of_tokens(model_dir: Path) -> None:
    model = load_model(model_dir, MODEL_NAME)
    body = {"model": MODEL_NAME, "input": "x", "include": ["message.output_text.logprobs"]}
    prepared = prepare(parse_responses(json.dumps(body).encode()), model, None, model.max_context_tokens)
    token_ids = model.chat_codec.encode("hello", add_special_tokens=False) * 60_000
    positions = tuple(PositionLogprobs(TokenLogprob(token, -1.0), ()) for token in token_ids)
    choice = CollectedChoice(0)
    choice.add(ChoiceUpdate(0, "hello" * 60_000, token_ids, positions, FinishReason.STOP))
    answer = json.loads(ResponsesEncoder(prepared, None).encode_body([choice], Usage(1, len(token_ids), 0)))
    assert len(answer["output"][0]["content"][0]["logprobs"]) == len(token_ids)


def test_of_a_million_wrong_token_ids_one_is_complained_of() -> None:
    with pytest.raises(ValidationError) as complaint:
        DetokenizeBody.model_validate_json(b'{"tokens":[' + b"-1," * 1000 + b"-1]}")
    assert complaint.value.error_count() == 1


@pytest.mark.parametrize("kind", [ChatBody, TokenizeBody])
def test_of_messages_full_of_wrong_calls_one_is_complained_of(kind: type[ChatBody] | type[TokenizeBody]) -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": [1] * 1024}
    with pytest.raises(ValidationError) as complaint:
        kind.model_validate_json(json.dumps({"model": "m", "messages": [message] * 100}))
    assert complaint.value.error_count() <= 1024


def test_of_very_many_wrong_stops_one_is_complained_of() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stop": [1] * 1000}
    with pytest.raises(ValidationError) as complaint:
        ChatBody.model_validate_json(json.dumps(body))
    assert complaint.value.error_count() == 1
