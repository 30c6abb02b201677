"""How much of an answer was thought, as usage tells it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from tests.services.gateway.conftest import END, MODEL_NAME, TEMPLATE, MakeBench, tiny_tokenizer, write_model
from tests.services.gateway.fakes import speaking

MARKS = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("answer", "thought"),
    [
        ("<think>hello\n</think>\n\nworld", "<think>hello\n</think>"),
        ("<think>\n\n</think>\n\nworld", "<think>\n\n</think>"),
        ("<think></think>", "<think></think>"),
        ("world </think>", ""),
    ],
    ids=["some", "blank", "none", "a mark alone"],
)
async def test_whole_and_streamed_answers_count_the_same_thoughts(
    bench: MakeBench, tmp_path: Path, answer: str, thought: str
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    model = str(write_model(tmp_path, tokenizer, TEMPLATE + "{# <think></think> #}"))
    async with bench(model=model) as b:
        b.decode.script = speaking([*tokenizer.encode(answer).ids, END])
        asked: Any = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "x"}]}
        whole: Any = (await b.client.chat.completions.create(**asked)).usage
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        (streamed,) = [each.usage async for each in await b.client.chat.completions.create(**asked) if each.usage]
        assert whole == streamed
        assert whole.completion_tokens_details.reasoning_tokens == len(tokenizer.encode(thought).ids)
