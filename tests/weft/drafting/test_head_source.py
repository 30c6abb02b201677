"""When the draft model is asked, over long simulated runs: what it gains, and that it never loses more than 2%."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import pytest

from tests.weft.drafting.simulation import EOS, Seconds, Simulation, sequence_of
from tests.weft.drafting.test_speculator import repeated
from weft.engine.drafting.acceptance import AcceptanceRates, SourceRecord
from weft.engine.drafting.costs import StepCosts
from weft.engine.drafting.drafter import DraftRequest, DraftSource, DraftToken, Proposal
from weft.engine.drafting.graph_rows import GraphRows
from weft.engine.drafting.head_source import HeadSource
from weft.engine.drafting.speculator import AdaptiveSpeculator
from weft.engine.sequence import Sequence as EngineSequence

STEP: Seconds = lambda rows: 0.009 + 0.001 * rows  # noqa: E731


class SimulatedHead:
    """Knows the answers. A draft is right with probability `alpha(tokens so far)`; a pass takes `pass_seconds`.

    Grades say the truth about three of four drafts.
    """

    def __init__(self, alpha: Callable[[int], float], pass_seconds: float, first_seconds: float = 0.0) -> None:
        """`first_seconds`: that the first call takes longer."""
        self.answers: list[list[int]] = []
        self.now = 0.0
        self.num_calls = 0
        self._alpha, self._pass_seconds, self._first_seconds = alpha, pass_seconds, first_seconds
        self._random = Random(5)

    def draft(
        self, requests: Sequence[DraftRequest], goes_on: Callable[[EngineSequence, Sequence[DraftToken]], bool]
    ) -> list[Proposal]:
        self.now += 0.0 if self.num_calls else self._first_seconds
        self.num_calls += 1
        assert not any(sequence.is_bare for sequence, limit in requests if limit)
        found: dict[EngineSequence, list[DraftToken]] = {sequence: [] for sequence, _ in requests}
        active = [each for each in requests if each.limit]
        while active:
            self.now += self._pass_seconds
            for sequence, _ in active:
                found[sequence].append(self._token(sequence, found[sequence]))
            active = [each for each in active if self._goes_on(each, found[each.sequence], goes_on)]
        return [tuple(found[sequence]) for sequence, _ in requests]

    @staticmethod
    def _goes_on(
        request: DraftRequest, drafts: list[DraftToken], goes_on: Callable[[EngineSequence, list[DraftToken]], bool]
    ) -> bool:
        return len(drafts) < request.limit and goes_on(request.sequence, drafts)

    def forget(self, sequence: EngineSequence) -> None:
        """Nothing is kept."""

    def _token(self, sequence: EngineSequence, drafts: list[DraftToken]) -> DraftToken:
        place = sequence.num_generated + len(drafts)
        answer = next(each for each in self.answers if each[: sequence.num_generated] == sequence.token_ids[3:])
        is_right = self._random.random() < self._alpha(place)
        token_id = answer[place] if is_right else answer[place] + 1
        is_sure = is_right if self._random.random() < 0.75 else self._random.random() < 0.5
        return DraftToken(token_id, DraftSource.HEAD, 5 if is_sure else 1)


class SureHead(SimulatedHead):
    """Gives all drafts the best grade."""

    def _token(self, sequence: EngineSequence, drafts: list[DraftToken]) -> DraftToken:
        return super()._token(sequence, drafts)._replace(grade=5)


def fresh(num_tokens: int, seed: int) -> list[int]:
    """Return text that repeats nothing."""
    random = Random(seed)
    return [random.randrange(5, 10**6) for _ in range(num_tokens)]


def simulate(
    head: SimulatedHead, answers: list[list[int]], step_seconds: Seconds = STEP, graph_rows: GraphRows | None = None
) -> Simulation:
    head.answers = answers
    run = Simulation(speculator_with(head, graph_rows), step_seconds, graph_rows=graph_rows)
    run.run([[1, 2, 3]] * len(answers), answers)
    run.seconds += head.now
    return run


@pytest.mark.parametrize(
    ("alpha", "pass_seconds", "least"), [(0.9, 0.0005, 2.4), (0.8, 0.0008, 1.8), (0.7, 0.001, 1.4)]
)
def test_head_gains_what_its_acceptance_allows(alpha: float, pass_seconds: float, least: float) -> None:
    run = simulate(SimulatedHead(lambda place: alpha, pass_seconds), [fresh(4000, 1)])
    assert run.ratio > least


@pytest.mark.parametrize("num_sequences", [1, 5])
@pytest.mark.parametrize(("alpha", "pass_seconds"), [(0.0, 0.001), (0.3, 0.004), (0.8, 0.02), (0.5, 0.01)])
def test_head_that_does_not_pay_costs_less_than_two_percent(
    alpha: float, pass_seconds: float, num_sequences: int
) -> None:
    head = SimulatedHead(lambda place: alpha, pass_seconds)
    run = simulate(head, [fresh(6000, seed) for seed in range(num_sequences)])
    assert head.num_calls
    assert run.ratio > 0.98


def test_acceptance_that_falls_costs_less_than_two_percent() -> None:
    """The gain of the first part counts only as much as the ledger lets it."""
    head = SimulatedHead(lambda place: 0.9 if place < 500 else 0.05, 0.001)
    run = simulate(head, [fresh(500, 1)])
    before = run.seconds, run.plain_seconds
    run = simulate(SimulatedHead(lambda place: 0.9 if place < 500 else 0.05, 0.001), [fresh(8000, 1)])
    assert (run.plain_seconds - before[1]) / (run.seconds - before[0]) > 0.98


def test_copies_that_are_better_leave_the_head_unasked() -> None:
    head = SimulatedHead(lambda place: 0.6, 0.001)
    run = simulate(head, [repeated(6000, 1)], lambda rows: 0.010)
    assert run.ratio > 7.0
    assert head.num_calls < run.num_steps


def test_head_of_no_use_does_not_turn_copies_off() -> None:
    """Passages repeat between fresh ones, in which an untested head drafts long."""
    seen = fresh(40, 2)
    text = [token for seed in range(8) for token in (*fresh(12, 10 + seed), *seen)]

    def step_seconds(rows: int) -> float:
        return 0.020 + 0.0015 * rows

    speculator = AdaptiveSpeculator((EOS,), clock=lambda: 0.0)
    alone = Simulation(speculator, step_seconds)
    alone.run([[1, 2, 3]], [text])
    run = simulate(SimulatedHead(lambda place: 0.0, 0.004), [text], step_seconds)
    assert run.ratio > 0.9 * alone.ratio


def test_first_drafts_of_a_slow_head_do_not_turn_copies_off() -> None:
    """A draft takes half of a step, five times what is assumed of a head that was never asked; and all look right."""
    head = SureHead(lambda place: 0.0, 0.001)
    answer = [*fresh(60, 1), *repeated(600, 1)]
    run = simulate(head, [answer], lambda rows: 0.0018 + 0.0002 * rows)
    alone = Simulation(AdaptiveSpeculator((EOS,), clock=lambda: 0.0), lambda rows: 0.0018 + 0.0002 * rows)
    alone.run([[1, 2, 3]], [answer])
    assert head.num_calls
    assert run.num_steps < 1.1 * alone.num_steps


def test_head_is_asked_more_rarely_while_it_brings_nothing() -> None:
    source = HeadSource(SimulatedHead(lambda place: 0.0, 0.0), StepCosts(), AcceptanceRates(), lambda: 0.0)
    record, sequence, asked = SourceRecord(), sequence_of([1, 2, 3], 400), []
    while len(sequence.token_ids) < 200:
        if not record.is_shut(len(sequence.token_ids)):
            asked.append(len(sequence.token_ids))
            source.judge(sequence, record, num_drafts=1, num_accepted=0, saved=0.0)
        sequence.token_ids.append(7)
    gaps = [after - before for before, after in pairwise(asked)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 64
    source.judge(sequence, record, num_drafts=1, num_accepted=1, saved=0.0)
    source.judge(sequence, record, num_drafts=1, num_accepted=0, saved=0.0)
    assert not record.is_shut(asked[-1] + gaps[-1] * 2)


def test_head_returns_when_its_drafts_are_accepted_again() -> None:
    head = SimulatedHead(lambda place: 0.0 if place < 2000 else 0.9, 0.0005)
    run = simulate(head, [fresh(8000, 1)])
    assert run.num_tokens / run.num_steps > 1.5


def test_drafts_that_are_cut_each_time_cost_less_than_two_percent() -> None:
    """An end token, or one that the grammar refuses, leaves nothing to verify."""
    head = EndingHead(lambda place: 1.0, 0.004)
    run = simulate(head, [fresh(6000, 1)])
    assert head.num_calls
    assert not run.num_drafts
    assert run.ratio > 0.98


@pytest.mark.parametrize(("num_sequences", "alpha"), [(1, 0.0), (4, 0.3), (16, 0.5)])
def test_layer_of_a_head_that_does_not_pay_is_left_out(num_sequences: int, alpha: float) -> None:
    """Filled for all tokens, it would take 7% of each step."""
    head = SimulatedHead(lambda place: alpha, 0.01)
    speculator = speculator_with(head)
    run = Simulation(speculator, STEP, fill_seconds=0.07 * STEP(num_sequences) / num_sequences)
    for turn in range(40):
        head.answers = [fresh(300, 100 * turn + index) for index in range(num_sequences)]
        run.run([[1, 2, 3]] * num_sequences, head.answers)
    run.seconds += head.now
    assert run.ratio > 0.98


def test_layer_is_filled_again_once_drafts_pay() -> None:
    rates, runs = [0.0], list[Simulation]()
    head = SimulatedHead(lambda place: rates[0], 0.0005)
    speculator = speculator_with(head)
    for rates[0] in (0.0, 0.9):
        runs.append(run := Simulation(speculator, STEP, fill_seconds=0.0005))
        for turn in range(60):
            head.answers = [fresh(200, turn)]
            run.run([[1, 2, 3]], head.answers)
    assert runs[0].num_tokens / runs[0].num_steps < 1.05
    assert runs[1].num_tokens / runs[1].num_steps > 1.5


def speculator_with(head: SimulatedHead, graph_rows: GraphRows | None = None) -> AdaptiveSpeculator:
    speculator = AdaptiveSpeculator((EOS,), clock=lambda: head.now, graph_rows=graph_rows)
    speculator.set_head(head)
    return speculator


class EndingHead(SimulatedHead):
    """Drafts end tokens."""

    def _token(self, sequence: EngineSequence, drafts: list[DraftToken]) -> DraftToken:
        return DraftToken(EOS, DraftSource.HEAD, 5)


def test_seconds_of_first_passes_do_not_count_in_graphs() -> None:
    """They capture graphs, which takes as long as hundreds of steps."""
    runs = []
    for first_seconds in (0.0, 3.0):
        head, rows = SimulatedHead(lambda place: 0.9, 0.0005, first_seconds), GraphRows((1, 2, 4, 8), 512)
        runs.append(simulate(head, [fresh(3000, 1)], graph_rows=rows))
    assert 3000 / runs[0].num_steps > 2
    assert runs[1].num_steps == pytest.approx(runs[0].num_steps, rel=0.02)
