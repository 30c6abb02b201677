"""The agent's session: its turns, the answers that a worker replays, and texts that must be equal."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from loadtest.models import NANO
from loadtest.speculation.agent import ALL, ANSWER, CALL, EDIT, FILE, REWRITE, Agent, measure, session
from loadtest.speculation.replay_worker import ReplayCompiler, replay_grammar, replayed_ids
from loadtest.speculation.tasks import ReplayedText
from openai import OpenAI
from training.weft_nano.tokenizer import load_tokenizer

from weft.request import Grammar
from weft.worker.engine_client import GrammarCompiler
from weft_services.gateway.grammar.answer_grammar import join_parts, lark_part


class Completions:
    """Answers with one text, which some of its tokens were drafts of."""

    def __init__(self, text: str, accepted: int) -> None:
        self._text = text
        self._tokens = {"completion": 10, "drafted": 2 * accepted, "accepted": accepted}
        self.asked: list[dict[str, Any]] = []

    def create(self, **fields: Any) -> Any:
        self.asked.append({**fields, "messages": list(fields["messages"])})
        message = SimpleNamespace(model_dump=lambda **_: {"role": "assistant", "content": self._text})
        return SimpleNamespace(
            headers={"x-weft-timeline": json.dumps({"tokens": self._tokens})},
            parse=lambda: SimpleNamespace(choices=[SimpleNamespace(message=message)]),
        )


def agent(off: Completions, on: Completions) -> Agent:
    clients = {
        mode: cast(OpenAI, SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(with_raw_response=each))))
        for mode, each in (("off", off), ("on", on))
    }
    return Agent("m", load_tokenizer(NANO), clients)


def test_session_has_twenty_turns_that_change_the_file() -> None:
    turns = list(session())
    kinds = [turn.kind for turn in turns]
    assert {kind: kinds.count(kind) for kind in kinds} == {CALL: 10, EDIT: 4, REWRITE: 1, ANSWER: 5}
    (rewrite,) = [turn.forced for turn in turns if turn.kind == REWRITE]
    written = rewrite.removeprefix("```python\n").removesuffix("```\n")
    assert [line for line in written.splitlines() if line not in FILE.splitlines()] == [
        "        self.items = dict()",
        "    def ship(self, name, count):",
        "            raise KeyError(name)",
    ]


def test_one_request_of_each_turn_has_no_drafts() -> None:
    off, on = Completions("Done.", 0), Completions("Done.", 6)
    figures = measure([agent(off, on), agent(off, on)])
    assert len(off.asked) == len(on.asked) == 40
    assert all(fields["extra_body"]["speculation"] is False for fields in off.asked)
    assert not any("speculation" in fields["extra_body"] for fields in on.asked)
    assert [fields["messages"] for fields in off.asked] == [fields["messages"] for fields in on.asked]
    assert (figures[ALL].turns, figures[ALL].tokens) == (20, 200)
    assert figures[EDIT].row(EDIT, 1)[-2:] == ["3.00", "0.50"]


def test_different_texts_end_the_session() -> None:
    with pytest.raises(ValueError, match="turn 1: the text differs with drafts"):
        measure([agent(Completions("Done.", 0), Completions("Done!", 6))])


def test_replayed_tokens_survive_the_gateway() -> None:
    assert replayed_ids(join_parts([lark_part(replay_grammar([12, 7, 2]), "format")])) == (12, 7, 2)
    assert replayed_ids(join_parts([lark_part('start: "a" <[7]>', "format")])) == ()


async def test_worker_replays_such_grammars_only() -> None:
    class Others(GrammarCompiler):
        async def compile(self, grammar: Grammar | None, with_twins: bool) -> None:
            compiled.append(grammar)

    compiled: list[Grammar | None] = []
    compiler = ReplayCompiler(Others())
    replayed = await compiler.compile(Grammar(join_parts([lark_part(replay_grammar([5, 2]), "answer")]), ""), True)
    assert isinstance(replayed, ReplayedText)
    assert replayed.valid([5, 9]) == 2
    other = Grammar(join_parts([lark_part('start: "a"', "answer")]), "")
    await compiler.compile(other, False)
    await compiler.compile(None, False)
    assert compiled == [other, None]
