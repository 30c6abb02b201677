"""What penalties look back on crosses the wire: a hand-off in the middle of an answer counts what was generated."""

from __future__ import annotations

from tests.services.attach import prompt
from tests.services.workers import start_pair
from tests.weft.tiny_llama import Tiny
from weft.request import SamplingParams


async def test_penalties_go_on_where_another_worker_left_off(tiny: Tiny) -> None:
    sampling = SamplingParams(12, ignore_eos=True, frequency_penalty=1.5, repetition_penalty=1.25)
    async with start_pair(tiny) as pair:
        token_ids = prompt(20)
        whole = (await pair.gateway.generate(token_ids, pair.prefill.address, sampling=sampling)).tokens
        assert whole != pair.expected(token_ids)[:12]
        resumed = (*token_ids, *whole[:5])
        rest = await pair.gateway.generate(resumed, pair.prefill.address, sampling=sampling, resumed_tokens=5)
        assert rest.failure is None
        assert [*whole[:5], *rest.tokens] == list(whole)
