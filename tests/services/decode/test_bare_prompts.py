"""Prompts of which the decode worker does not want the draft layer's KV, and what it drafts behind them later."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.services.attach import prompt
from tests.services.workers import Drafting, start_pair
from tests.weft.engine.tiny_heads import MixedSpeculator, SlowTwin, assert_drafts_are_those_of, with_head
from tests.weft.tiny_llama import Tiny
from weft.engine.messages import SequenceSpec


async def test_prefill_leaves_out_the_draft_layer_while_decode_does_not_use_it(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once decode drafts again, it finds the first prompt's blocks and sees only the tokens behind them."""
    tiny, make_head = with_head(tiny)
    speculator, orders = MixedSpeculator({}, share_bare=1.0), list[bool]()
    async with start_pair(tiny, drafting=Drafting(make_head, speculator)) as pair:
        engine = pair.prefill.engine

        def submit(spec: SequenceSpec, submit: Callable[[SequenceSpec], None] = engine.submit) -> None:
            orders.append(spec.is_bare)
            submit(spec)

        monkeypatch.setattr(engine, "submit", submit)
        answer = await pair.gateway.generate(prompt(22), pair.prefill.address)
        assert answer.tokens == pair.expected(prompt(22))
        assert not speculator.drafted
        speculator.share_bare = 0.0
        longer, other = [*prompt(22), *answer.tokens, *prompt(9, seed=9)], prompt(30, seed=3)
        for token_ids in (longer, other):
            answer = await pair.gateway.generate(token_ids, pair.prefill.address)
            assert answer.tokens == pair.expected(token_ids)
        await pair.until_idle()
    assert orders == [True, False, False]
    drafted = {
        name: [each for each in speculator.drafted if list(each.token_ids[:22]) == list(text[:22])]
        for name, text in (("longer", longer), ("other", other))
    }
    assert drafted["longer"]
    assert drafted["other"]
    assert all(each.num_bare >= 20 for each in drafted["longer"])
    assert not any(each.num_bare for each in drafted["other"])
    assert_drafts_are_those_of(SlowTwin(tiny, make_head), speculator.drafted, 4)
