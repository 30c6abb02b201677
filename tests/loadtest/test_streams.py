"""What the stream test counts: silences, and whose."""

from __future__ import annotations

import httpx
from loadtest.answers import Answer, Ask, Choice, ask
from loadtest.streams import Tally, parse

ASK = Ask("a", {})


def answer(first_seconds: float, longest_gap: float) -> Answer:
    return Answer({0: Choice("x")}, first_seconds=first_seconds, longest_gap=longest_gap)


def test_silence_before_the_first_token_counts_from_the_fault_on() -> None:
    answers = [answer(1.5, 0.2), answer(0.3, 0.2), answer(0.3, 0.9), answer(0.0, 0.0)]
    tally = Tally()
    tally.add([ASK] * 4, answers, answers, struck=0.5)
    assert tally.stalls == [1.0, 0.2, 0.9], "the last came in one piece"
    assert (tally.streams, tally.first_tokens, tally.wrong) == (4, [1.5, 0.3, 0.3], [])


def test_undisturbed_only_silences_between_tokens_count() -> None:
    tally = Tally()
    tally.add([ASK], [answer(1.5, 0.2)], [answer(1.5, 0.2)])
    assert tally.stalls == [0.2]


async def test_an_answer_in_one_piece_has_no_silences() -> None:
    answered = {
        "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}},
    }
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=answered))
    async with httpx.AsyncClient(base_url="http://x", transport=transport) as client:
        said = await ask(client, ASK)
    assert (said.choices[0].text, said.first_seconds, said.error) == ("x", 0.0, "")


def test_unless_told_otherwise_every_fault_has_its_fifty_rounds() -> None:
    options = parse([])
    assert (options.rounds, len(options.faults)) == (50, 4)
