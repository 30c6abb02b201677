"""Metrics of speculation: what a scrape shows of the counters, and the alarm for a useless draft head."""

from __future__ import annotations

import asyncio
import logging

import pytest

from weft.asyncio_compat import background_tasks
from weft.engine.drafting.draft_stats import DraftStats, OffReason, SourceStats
from weft.engine.drafting.drafter import DraftSource
from weft.metrics import REGISTRY
from weft.worker import draft_metrics
from weft.worker.draft_metrics import JUDGED_PROPOSALS, HeadAlarm, exposed, watch_head


def head(num_proposals: int, num_accepted: int) -> SourceStats:
    return SourceStats(num_proposals, (num_proposals, num_proposals), (num_accepted, 0))


def test_counters_are_exposed_inside_the_block_only() -> None:
    copies = SourceStats(5, (5, 4), (4, 3))
    stats = DraftStats({DraftSource.COPY: copies}, (0, 2, 0, 3), {OffReason.COST: 1.5}, 0.25)
    copied = {"source": "copy"}
    with exposed(lambda: stats):
        assert REGISTRY.get_sample_value("weft_spec_drafts_total", copied) == 5
        assert REGISTRY.get_sample_value("weft_spec_accepted_tokens_total", copied) == 7
        assert REGISTRY.get_sample_value("weft_spec_tokens_per_step_sum") == 11
        assert REGISTRY.get_sample_value("weft_spec_tokens_per_step_bucket", {"le": "2.0"}) == 2
        assert REGISTRY.get_sample_value("weft_spec_off_seconds_total", {"reason": "cost"}) == 1.5
    assert REGISTRY.get_sample_value("weft_spec_drafts_total", copied) == 0


def test_head_alarm_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    alarm = HeadAlarm()
    with caplog.at_level(logging.WARNING):
        alarm.judge(head(JUDGED_PROPOSALS, 100))
        alarm.judge(head(2 * JUDGED_PROPOSALS, 200))
    assert alarm.is_useless
    assert caplog.messages == ["draft head useless tokens_per_step=1.05 proposals=2000"]


def test_head_alarm_waits_for_enough_proposals() -> None:
    alarm = HeadAlarm()
    alarm.judge(head(JUDGED_PROPOSALS - 1, 0))
    assert not alarm.is_useless


@pytest.mark.parametrize(("num_accepted", "is_useless"), [(299, True), (301, False)])
def test_head_alarm_asks_for_1_15_tokens_a_step(num_accepted: int, is_useless: bool) -> None:
    alarm = HeadAlarm()
    alarm.judge(head(JUDGED_PROPOSALS, num_accepted))
    assert alarm.is_useless is is_useless


def test_head_alarm_ends_when_drafts_are_right_again() -> None:
    alarm = HeadAlarm()
    alarm.judge(head(JUDGED_PROPOSALS, 0))
    alarm.judge(head(2 * JUDGED_PROPOSALS, 2000))
    assert not alarm.is_useless


async def test_useless_head_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_metrics, "JUDGE_SECONDS", 0.0)
    is_read = asyncio.Event()

    def read() -> DraftStats:
        is_read.set()
        return DraftStats({DraftSource.HEAD: head(JUDGED_PROPOSALS, 0)}, (), {}, 0.0)

    with exposed(read):
        async with background_tasks() as tasks:
            tasks.create_task(watch_head())
            await is_read.wait()
        assert REGISTRY.get_sample_value("weft_spec_head_useless") == 1
    assert REGISTRY.get_sample_value("weft_spec_head_useless") == 0
