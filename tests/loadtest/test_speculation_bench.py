"""The speculation benchmark on weft-nano: right drafts are accepted, wrong ones are not, and texts stay equal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from loadtest.models import NANO
from loadtest.speculation.bench import OFF, Bench, Point, drafters, measure
from loadtest.speculation.tasks import TaskMaker
from training.weft_nano.tokenizer import load_tokenizer

from weft.request import NO_DRAFTS

DRAFTERS = ("auto", "grammar", "1x3", "0x2")


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench(NANO, "float32", 0.0, time.perf_counter)
    yield bench
    bench.close()


@pytest.mark.parametrize("task", ["tools", "edit"])
def test_recorded_drafts_are_accepted_as_asked(bench: Bench, task: str) -> None:
    prompts = [replace(prompt, max_tokens=24) for prompt in TaskMaker(load_tokenizer(NANO)).make(task, 2)]
    points = {each.drafter: each.runs[0] for each in measure(bench, prompts, 2, drafters(DRAFTERS), rounds=1)}
    assert points[OFF].tokens_per_step == 1.0
    assert points["1x3"].tokens_per_step > 3.0
    assert points["1x3"].drafts.accepted == points["1x3"].drafts.verified
    assert points["0x2"].drafts.verified > 0
    assert points["0x2"].drafts.accepted == 0
    assert all(run.answers == points[OFF].answers for run in points.values())


def test_head_runs_in_an_engine_of_its_own(bench: Bench) -> None:
    prompts = [replace(prompt, max_tokens=40) for prompt in TaskMaker(load_tokenizer(NANO)).make("chat", 2)]
    headed = Bench(NANO, "float32", 0.0, time.perf_counter, NANO / "draft")
    points = {each.drafter: each.runs[0] for each in measure(bench, prompts, 2, drafters(("head",)), 1, headed)}
    headed.close()
    assert points["head"].answers == points[OFF].answers
    assert points[OFF].drafts == NO_DRAFTS


def test_ratio_compares_runs_of_the_same_round(bench: Bench) -> None:
    prompts = TaskMaker(load_tokenizer(NANO)).make("tools", 1)
    (point,) = measure(bench, prompts, 1, {}, rounds=2)
    slow, fast = point.runs
    slow.seconds, slow.tokens, fast.seconds, fast.tokens = 2.0, 10, 1.0, 20
    assert Point("auto", [slow, fast], [fast, slow]).ratio == pytest.approx((0.25 + 4.0) / 2)
