"""The choice of drafts for steps that are graphs: all sequences have as many rows, and padding costs time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.weft.drafting.simulation import EOS, Simulation, sequence_of
from tests.weft.drafting.test_speculator import TABLES, Adversary, misleading, repeated
from weft.engine.drafting.drafter import DecodeStep, DraftOutcome, DraftSource, DraftToken
from weft.engine.drafting.graph_rows import EvenDrafts, GraphRows
from weft.engine.drafting.speculator import AdaptiveSpeculator

ROWS = GraphRows((1, 2, 4, 8), 512)


def run_of(table: str) -> Simulation:
    drafting = AdaptiveSpeculator((EOS,), clock=lambda: 0.0, graph_rows=ROWS)
    return Simulation(drafting, TABLES[table], graph_rows=ROWS)


def step_of(*num_drafts: int, num_prompt_rows: int = 0) -> DecodeStep:
    draft = DraftToken(5, DraftSource.COPY)
    outcomes = [DraftOutcome(sequence_of([1, 2], 9), (draft,) * number, 0, 1) for number in num_drafts]
    num_rows = len(num_drafts) + sum(num_drafts)
    return DecodeStep(outcomes, num_rows, num_prompt_rows, 100 * num_rows, 0.01)


def test_graphs_hold_the_longest_proposal_if_they_have_room() -> None:
    assert [ROWS.draft_counts(1, longest) for longest in (1, 2, 3, 4, 7, 9)] == [
        [1],
        [1, 3],
        [1, 3],
        [1, 3, 7],
        [1, 3, 7],
        [1, 3, 7],
    ]
    assert [ROWS.draft_counts(num, 7) for num in (64, 65, 128, 129, 256, 257)] == [
        [1, 3, 7],
        [1, 3],
        [1, 3],
        [1],
        [1],
        [],
    ]


@pytest.mark.parametrize(
    ("num_drafts", "num_prompt_rows", "num_rows"),
    [
        ((0, 0), 0, 2),
        ((1, 0), 0, 4),
        ((3, 1, 0), 0, 12),
        ((4,), 0, 8),
        ((8, 0), 0, 10),
        ((1, 0), 64, 3),
        ((5,) + (0,) * 64, 0, 70),
    ],
)
def test_steps_cost_their_padded_rows(num_drafts: tuple[int, ...], num_prompt_rows: int, num_rows: int) -> None:
    """More drafts than a graph has rows, prompts, and more rows than graphs have run without padding."""
    padded = ROWS.pad(step_of(*num_drafts, num_prompt_rows=num_prompt_rows))
    assert padded.num_rows == num_rows
    assert padded.context_tokens == 100 * len(num_drafts)


def test_drafts_are_as_many_as_gain_the_most_tokens_a_second() -> None:
    survivals = [[0.9, 0.8, 0.7, 0.6, 0.5], [0.9], []]
    flat, steep = [1.0] * 25, [1.0 + rows / 4 for rows in range(25)]
    order = EvenDrafts(survivals, ROWS)
    assert order.most == 21
    assert list(order.below(21)) == [9, 3]
    assert order.best([10] * 3, flat, 0.0) == 21
    assert order.split(21) == [5, 1, 0]
    assert order.best([10] * 3, [1.0, 1.0, 1.0, 1.0, *[2.0] * 21], 0.0) == 3
    assert order.split(3) == [1, 1, 0]
    assert order.best([10] * 3, steep, 0.0) == 0
    assert order.split(0) == [0, 0, 0]
    # With a long context, which all rows of a sequence read together, more rows cost little.
    assert order.best([1000] * 3, steep, 0.01) == 21
    assert EvenDrafts([[], []], ROWS).most == 0


@pytest.mark.parametrize(
    ("table", "least"), [("flat", 4.5), ("linear", 3.0), ("cliff", 2.3), ("each row costs a step", 0.99)]
)
def test_repeated_text_gains_what_the_table_allows_in_graphs(table: str, least: float) -> None:
    run = run_of(table)
    run.run([[1, 2, 3]], [repeated(6000, 1)])
    assert run.ratio > least
    if table == "cliff":  # until steps of 4 rows are measured, and hardly again
        assert run.rows.count(8) < 0.03 * len(run.rows)
        assert run.rows[400:].count(8) < 5


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("num_sequences", [1, 5])
def test_text_that_misleads_costs_less_than_two_percent_in_graphs(table: str, num_sequences: int) -> None:
    run = run_of(table)
    answers = [repeated(1000, seed) + misleading(2500, seed) for seed in range(num_sequences)]
    run.run([[1, 2, 3]] * num_sequences, answers)
    assert run.num_drafts
    assert run.ratio > 0.98


@pytest.mark.parametrize("table", TABLES)
def test_adversary_gains_no_more_than_two_percent_in_graphs(table: str) -> None:
    run = run_of(table)
    sequences, adversary = [sequence_of([1, 2, 3], 1 << 30) for _ in range(2)], Adversary(3)
    for _ in range(5_000):
        run.step(sequences, adversary.answer)
    assert run.num_drafts
    assert run.seconds <= run.plain_seconds / 0.98


@pytest.mark.parametrize("table", TABLES)
def test_seconds_of_captures_do_not_count(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of each size takes 3 s more."""
    runs = [run_of(table) for _ in range(2)]
    sizes: set[tuple[int, int]] = set()
    on_step = AdaptiveSpeculator.on_step

    def captured(drafting: AdaptiveSpeculator, step: DecodeStep) -> None:
        padded = ROWS.pad(step)
        size = len(step.outcomes), padded.num_rows
        is_first = drafting is runs[1].speculator and size not in sizes
        sizes.add(size)
        on_step(drafting, replace(step, seconds=step.seconds + 3.0 * is_first))

    monkeypatch.setattr(AdaptiveSpeculator, "on_step", captured)
    for run in runs:
        sizes.clear()
        run.run([[1, 2, 3]], [repeated(3000, 1)])
    assert runs[1].num_steps == pytest.approx(runs[0].num_steps, rel=0.02)
