"""The choice of drafts over long simulated runs: what it gains, and that it never loses more than 2% of the time."""

from __future__ import annotations

from random import Random

import pytest

from tests.weft.drafting.simulation import EOS, Seconds, Simulation, sequence_of
from weft.engine.drafting.draft_stats import OffReason
from weft.engine.drafting.drafter import DraftRequest, DraftSource
from weft.engine.drafting.speculator import AdaptiveSpeculator
from weft.engine.sequence import Sequence

TABLES: dict[str, Seconds] = {
    "flat": lambda rows: 0.010,
    "linear": lambda rows: 0.009 + 0.001 * rows,
    "cliff": lambda rows: 0.010 if rows <= 4 else 0.050,
    "each row costs a step": lambda rows: 0.010 * rows,
}


def repeated(num_tokens: int, seed: int, error: float = 0.0) -> list[int]:
    """Return text that repeats 300 tokens, a share of them replaced."""
    random = Random(seed)
    period = [random.randrange(5, 2000) for _ in range(300)]
    text = [period[place % 300] for place in range(num_tokens)]
    return [random.randrange(5, 2000) if random.random() < error else token for token in text]


def misleading(num_tokens: int, seed: int) -> list[int]:
    """Return text with 50 phrases, none of which ever goes on as it did before."""
    random = Random(seed)
    phrases = [[random.randrange(5, 2000) for _ in range(3)] for _ in range(50)]
    text: list[int] = []
    while len(text) < num_tokens:
        text += [*random.choice(phrases), random.randrange(2000, 9000)]
    return text[:num_tokens]


def speculator() -> AdaptiveSpeculator:
    return AdaptiveSpeculator((EOS,), clock=lambda: 0.0)


@pytest.mark.parametrize(
    ("table", "least"), [("flat", 8.0), ("linear", 4.5), ("cliff", 2.7), ("each row costs a step", 0.99)]
)
def test_repeated_text_gains_what_the_table_allows(table: str, least: float) -> None:
    run = Simulation(speculator(), TABLES[table])
    run.run([[1, 2, 3]], [repeated(6000, 1)])
    assert run.ratio > least


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("num_sequences", [1, 5])
def test_text_that_misleads_costs_less_than_two_percent(table: str, num_sequences: int) -> None:
    run = Simulation(speculator(), TABLES[table])
    answers = [repeated(1000, seed) + misleading(2500, seed) for seed in range(num_sequences)]
    run.run([[1, 2, 3]] * num_sequences, answers)
    assert run.num_drafts
    assert run.ratio > 0.98


class Adversary:
    """Accepts all drafts until they are trusted, then rejects all until none come, and starts again."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._base = [self._random.randrange(5, 2000) for _ in range(200)]
        self._is_honest = True
        self._num_quiet = 0

    def answer(self, sequence: Sequence, drafts: list[int]) -> list[int]:
        self._num_quiet = 0 if drafts else self._num_quiet + 1
        if len(drafts) >= 6:
            self._is_honest = False
        elif self._num_quiet > 40:
            self._is_honest = True
        if self._is_honest or not drafts:
            return [*drafts, self._base[(len(sequence.token_ids) + len(drafts)) % len(self._base)]]
        return [drafts[0] + 1]


@pytest.mark.parametrize("table", TABLES)
def test_adversary_gains_no_more_than_two_percent(table: str) -> None:
    run = Simulation(speculator(), TABLES[table])
    sequences = [sequence_of([1, 2, 3], 1 << 30) for _ in range(2)]
    adversary = Adversary(3)
    for _ in range(5_000):
        run.step(sequences, adversary.answer)
    assert run.num_drafts
    assert run.seconds <= run.plain_seconds / 0.98


def test_drafts_return_when_text_becomes_repeated() -> None:
    run = Simulation(speculator(), TABLES["linear"])
    run.run([[1, 2, 3]], [misleading(3000, 1) + repeated(3000, 2)])
    assert run.num_tokens / run.num_steps > 1.5


@pytest.mark.parametrize(("row_seconds", "has_drafts"), [(0.0003, True), (0.02, False)])
def test_drafts_next_to_a_prompt_pay_by_the_row(row_seconds: float, has_drafts: bool) -> None:
    run = Simulation(speculator(), TABLES["linear"], row_seconds)
    run.run([[1, 2, 3]], [repeated(900, 1)])
    run.num_drafts, run.num_prompt_rows = 0, 64
    run.run([repeated(600, 4)], [repeated(900, 4)])
    assert (run.num_drafts > 0) == has_drafts


def test_drafts_end_before_an_end_token_and_at_the_limit() -> None:
    drafting = speculator()
    text = [*range(10, 20), 77, EOS, *range(30, 40)]
    Simulation(drafting, TABLES["flat"]).run([[1, 2, 3]], [repeated(700, 1)])
    proposed = []
    for limit in (12, 2, 0):
        (drafts,) = drafting.propose([DraftRequest(sequence_of([*text, *text[:8]], 100), limit)], 0)
        proposed.append([draft.token_id for draft in drafts])
    assert proposed == [[18, 19, 77], [18, 19], []]


def test_prediction_is_proposed_before_the_answer_starts() -> None:
    drafting = speculator()
    Simulation(drafting, TABLES["flat"]).run([[1, 2, 3]], [repeated(700, 1)])
    sequence = sequence_of([5, 6, 7], 100, prediction=range(50, 80))
    (drafts,) = drafting.propose([DraftRequest(sequence, 99)], 0)
    assert [draft.token_id for draft in drafts] == [50, 51, 52, 53, 54, 55]
    assert {draft.source for draft in drafts} == {DraftSource.PREDICTION}


def test_stats_count_every_draft_and_token() -> None:
    drafting = speculator()
    run = Simulation(drafting, TABLES["linear"])
    run.run([[1, 2, 3]], [repeated(1500, 1, error=0.05)])
    stats = drafting.stats()
    copies = stats.sources[DraftSource.COPY]
    assert set(stats.sources) == {DraftSource.COPY}
    assert sum(copies.verified) == run.num_drafts
    assert sum(copies.accepted) == run.num_tokens - run.num_steps
    assert copies.verified[0] == copies.num_proposals
    assert sum(number * count for number, count in enumerate(stats.tokens_per_step)) == run.num_tokens
    assert set(stats.off_seconds) <= set(OffReason)
