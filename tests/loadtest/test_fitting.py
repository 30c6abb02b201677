"""The model of a worker, found again from what a worker of that model would have counted."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest
from loadtest.fleet.calibrate import LENGTHS
from loadtest.fleet.fitting import CHUNK_TOKENS, Look, Window, fit, windows
from loadtest.fleet.machine import H100
from loadtest.fleet.scheduler import SimulatedScheduler
from loadtest.fleet.simulator import FleetPlan, Simulation
from loadtest.fleet.trace import Request

from weft_mesh.v1.scheduler_service_pb2 import WorkerReport

SHARED = replace(
    H100,
    base=0.008,
    sequence=0.001,
    kv_token=0.0,
    prompt_token=4e-4,
    pair=2e-7,
    chunk_tokens=CHUNK_TOKENS,
    step_beside=0.002,
    token_beside=1e-4,
)


def test_fit_recovers_the_machine() -> None:
    besides = SHARED.handoff + SHARED.handoff_token * 100
    alone = [(length, SHARED.prefill(length, 0) + besides) for length in LENGTHS]
    prompts = [
        Window(0, 0.0, 0.0, 5120, 10 * SHARED.step(0, 0, 512, 256, others), float(others)) for others in (0, 1, 2)
    ]
    steps = [
        Window(50, SHARED.step(batch, 0, others=others), batch, 0, 0.0, float(others))
        for batch, others in ((1, 0), (2, 0), (5, 0), (1, 1), (3, 1))
    ]
    few = Window(0, 0.0, 0.0, 9, 3.0, 1.0)
    found = fit(alone, SHARED.step(1, 0), [*prompts, *steps, few], SHARED.kv_tokens)
    assert [found.base, found.sequence] == pytest.approx([SHARED.base, SHARED.sequence])
    assert [found.step_beside, found.token_beside * 512 + found.step_beside] == pytest.approx(
        [0.002, 1e-4 * 512 + 0.002], rel=0.05
    )
    for length in (64, 300, 700):
        expected = SHARED.prefill(length, 0) + besides
        got = found.prefill(length, 0) + found.handoff + found.handoff_token * length
        assert got == pytest.approx(expected, rel=0.1)


def test_time_between_steps_is_part_of_a_step() -> None:
    alone = [(length, SHARED.prefill(length, 0)) for length in LENGTHS]
    steps = [Window(50, SHARED.step(batch, 0), batch, 0, 0.0, 0.0) for batch in (1, 2, 5)]
    found = fit(alone, 0.0005 + SHARED.step(1, 0), [Window(0, 0.0, 0.0, 512, 0.3, 0.0), *steps], SHARED.kv_tokens)
    assert found.step(1, 0) == pytest.approx(0.0005 + SHARED.step(1, 0))
    assert found.step_beside == 0.0  # nobody else was at work: nothing is known


def test_windows_are_differences_of_counters() -> None:
    before = WorkerReport(
        generating_steps=10, generating_seconds=1.0, generating_sequences=20, computed_prompt_tokens=5
    )
    after = WorkerReport(
        generating_steps=30,
        generating_seconds=1.4,
        generating_sequences=100,
        computed_prompt_tokens=25,
        computing_seconds=0.5,
    )
    prompts = WorkerReport(computing_seconds=1.5)
    looks = [
        Look(3.0, {"decode-0": before, "prefill-0": WorkerReport()}),
        Look(5.0, {"decode-0": after, "prefill-0": prompts, "decode-1": before}),
    ]
    first, second = windows(looks)
    assert astuple(first) == pytest.approx((20, 0.02, 4.0, 20, 0.5, 0.75))
    assert second.others == pytest.approx(0.45)


def test_workers_on_one_machine_slow_each_other() -> None:
    asked = [Request(number, at, 512, 100, (), b"") for number, at in enumerate((0.0, 0.05))]
    plan = FleetPlan(SHARED, 1, 1)
    alone = Simulation(FleetPlan(replace(SHARED, step_beside=0.0, token_beside=0.0), 1, 1), SimulatedScheduler()).run(
        asked
    )
    beside = Simulation(plan, SimulatedScheduler()).run(asked)
    first, second = (sorted(run.jobs, key=lambda job: job.request.number) for run in (alone, beside))
    # the first prompt has the machine to itself, the second meets the first one's answer from its hand-off on
    assert second[0].first_token_at == pytest.approx(first[0].first_token_at)
    prompt = SHARED.prefill(512, 0)
    slowed = prompt + (1 - SHARED.handoff / prompt) * (512 * 1e-4 + 0.002)
    assert second[1].first_token_at - second[0].first_token_at == pytest.approx(slowed, rel=0.001)
    # a prompt beside it made steps of the first answer longer, then it has the machine to itself again
    assert second[0].ended_at > first[0].ended_at + 20 * 0.002
