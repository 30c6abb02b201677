"""Answers that a client has begun: the model goes on in the same turn, as Anthropic and vLLM have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.services.gateway.conftest import END, MODEL_NAME, Bench, MakeBench, tiny_tokenizer, write_model
from tests.services.gateway.fakes import speaking
from tests.services.gateway.test_anthropic import client
from tests.services.gateway.test_templates import BARE, SPECIAL, TEMPLATES
from weft.errors import InvalidRequest
from weft_services.gateway.generation import Conversation
from weft_services.gateway.text.chat_template import ChatTemplate

USER: Any = {"role": "user", "content": "weather?"}
BEGUN: Any = {"role": "assistant", "content": "It is <"}
CALL: Any = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}


def prompt(b: Bench) -> str:
    """What the model was shown last."""
    return b.tokenizer.decode(list(b.decode.started[-1].token_ids), skip_special_tokens=False)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("begun", ["It is <", "i", "<tool>\nuser"])
def test_a_turn_stays_open_as_transformers_leaves_it(name: str, begun: str) -> None:
    messages = [USER, {"role": "assistant", "content": begun}]
    rendered: Any = render_jinja_template(
        conversations=[messages],
        tools=[BARE],
        chat_template=TEMPLATES[name],
        add_generation_prompt=False,
        continue_final_message=True,
        **SPECIAL,
    )
    conversation = Conversation(tuple(messages), (BARE,), is_continued=True)
    assert ChatTemplate(TEMPLATES[name], SPECIAL).render(conversation) == rendered[0][0]


def test_a_template_that_leaves_the_last_message_out_refuses() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(InvalidRequest, match="does not let this message be continued"):
        template.render(Conversation((USER, BEGUN), is_continued=True))


async def test_a_message_goes_on_with_the_assistants_last_words(bench: MakeBench) -> None:
    async with bench() as b, client(b) as sdk:
        b.decode.script = speaking([*b.ids("b>sunny"), END])
        asked: Any = {"model": MODEL_NAME, "max_tokens": 9, "messages": [USER, BEGUN]}
        answer: Any = await sdk.messages.create(**asked)
        assert answer.content[0].text == "b>sunny"
        assert prompt(b).endswith("<|im_start|>assistant\nIt is <")
        counted = await sdk.messages.count_tokens(model=MODEL_NAME, messages=[USER, BEGUN])
        assert counted.input_tokens == len(b.decode.started[-1].token_ids)
        called = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "now", "input": {}}]}
        for last in (called, {"role": "assistant", "content": []}):
            assert (await b.http.post("/v1/messages", json={**asked, "messages": [USER, last]})).status_code == 200
            assert prompt(b).endswith("<|im_start|>assistant\n")
        empty = await b.http.post("/v1/messages", json={**asked, "messages": [{"role": "user", "content": []}]})
        assert empty.status_code == 400


async def test_a_chat_goes_on_where_vllms_clients_say_so(bench: MakeBench) -> None:
    async with bench() as b:
        more: Any = {"continue_final_message": True, "add_generation_prompt": False}
        await b.client.chat.completions.create(model=MODEL_NAME, messages=[USER, BEGUN], extra_body=more)
        assert prompt(b).endswith("<|im_start|>assistant\nIt is <")
        await b.client.chat.completions.create(model=MODEL_NAME, messages=[USER, BEGUN])
        assert prompt(b).endswith("It is <<|im_end|>\n<|im_start|>assistant\n")
        for fields in (
            {"messages": [USER], **more},
            {"messages": [USER, {**BEGUN, "content": ""}], **more},
            {"messages": [USER, {**BEGUN, "tool_calls": [CALL]}], **more},
        ):
            assert (await b.refused("/v1/chat/completions", **fields))[1]["param"] == "continue_final_message"
        for fields in (
            {"messages": [USER, BEGUN], **more, "add_generation_prompt": True},
            {"messages": [USER, BEGUN], "add_generation_prompt": False},
        ):
            assert (await b.refused("/v1/chat/completions", **fields))[1]["param"] == "add_generation_prompt"


@pytest.mark.parametrize(
    ("begun", "thoughts", "text"),
    [("<think>Hm,", "why", "so"), ("<think>Hm</think>", None, "why</think>so"), ("Well, ", None, "why</think>so")],
)
async def test_thoughts_that_have_begun_go_on_as_thoughts(
    bench: MakeBench, tmp_path: Path, begun: str, thoughts: str | None, text: str
) -> None:
    template = "{% for m in messages %}{{ m.content.replace('<think></think>', '') }}\n{% endfor %}"
    async with bench(model=str(write_model(tmp_path, tiny_tokenizer(), template))) as b:
        b.decode.script = speaking([*b.ids("why</think>so"), END])
        body = {"model": MODEL_NAME, "messages": [USER, {"role": "assistant", "content": begun}]}
        answer = await b.http.post("/v1/chat/completions", json={**body, "continue_final_message": True})
        message = answer.json()["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (thoughts, text)
