"""Logprobs of /v1/responses are those of the text: of all of it, however it was held back, and of nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.services.gateway.conftest import END, MODEL_NAME, TEMPLATE, MakeBench, tiny_tokenizer, write_model
from tests.services.gateway.fakes import speaking

TOOL: Any = {"type": "function", "name": "now", "parameters": {}, "strict": False}
CALL = '<tool_call>{"name": "now", "arguments": {"zone": "utc"'


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """With tokens of their own around calls, and one that may end a call and begin a text."""
    tokenizer = tiny_tokenizer()
    marks = ("<tool_call>", "</tool_call>")
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer.add_tokens([AddedToken("}} so", normalized=False)])
    return tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A model whose template says how calls are written."""
    calls = "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    template = TEMPLATE.replace("{{ m.tool_calls | tojson }}", calls)
    return write_model(tmp_path_factory.mktemp("calling"), tokenizer, template)


@pytest.mark.parametrize(
    ("answer", "tools", "stop", "told"),
    [
        ("hello <tool_call>world</tool_call>", [], [], ["hello <tool_call>world</tool_call>"]),
        ("hello <tool<tool_call>world", [TOOL], [], ["hello <tool<tool_call>world"]),
        ("hello \n" + CALL + "}}</tool_call>", [TOOL], [], ["hello"]),
        ("hello " + CALL + "}} so it is", [TOOL], [], ["hello", "}} so it is"]),
        ("hello ST <tool_call>STO", [], ["STOP", "o t"], ["hello ST <tool_call>STO"]),
    ],
    ids=["no tools", "no call", "a call", "a token of both", "stop strings"],
)
async def test_they_are_of_all_the_text_and_of_nothing_else(
    bench: MakeBench, answer: str, tools: list[Any], stop: list[str], told: list[str]
) -> None:
    async with bench() as b:
        b.decode.script = speaking([*b.ids(answer), END])
        asked: Any = {"model": MODEL_NAME, "input": "x", "tools": tools, "top_logprobs": 1}
        events = [
            event async for event in await b.client.responses.create(**asked, stream=True, extra_body={"stop": stop})
        ]
        whole = await b.client.responses.create(**asked, extra_body={"stop": stop})
        for output in (events[-1].response.output, whole.output):
            parts = [item.content[0] for item in output if item.type == "message"]
            assert ["".join(entry.token for entry in part.logprobs) for part in parts] == told
        ahead = ""
        for event in events:
            if event.type == "response.output_text.delta":
                ahead += "".join(entry.token for entry in event.logprobs)
                at = ahead.find(event.delta)
                assert at >= 0, "a token is told no later than its text"
                ahead = ahead[at + len(event.delta) :]
