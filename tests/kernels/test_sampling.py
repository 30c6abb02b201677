"""Sampling keeps the tokens that transformers keeps, draws by their probabilities, and depends on nothing else.

Draws are functions of their seeds, so every statistic here is the same in each run.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from weft_kernels import sampling
from weft_kernels.native import CHOICE
from weft_kernels.sampling import SAMPLING_VERSION, SamplingRows, logprobs, sample, sample_drafts
from weft_kernels.sampling.noise import gumbels, gumbels_of_words, philox
from weft_kernels.sampling.reference import filtered_scores, sample_reference

KNOWN_BITS = [
    [-1092266948, 1063396362, 1058410299],
    [-1093360110, 1045078252, -1083190912],
    [1052322499, 1069977592, 1062022372],
]
RECORDED_TOKENS = [12, 34, 1, 39, 25, 11, 14, 0, 38, 36, 15, 37]
GREEDY: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def make_rows(params: list[dict[str, Any]], seeds: list[int], positions: list[int]) -> SamplingRows:
    """Rows from parameters by name."""

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([{**GREEDY, **each}[name] for each in params], dtype=dtype)

    return SamplingRows(
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int64),
        top_p=column("top_p", torch.float64),
        min_p=column("min_p", torch.float32),
        seeds=torch.tensor(seeds),
        positions=torch.tensor(positions),
        has_top_k=any(each.get("top_k") for each in params),
        has_top_p=any(each.get("top_p", 1.0) < 1.0 for each in params),
    )


def kept_by_transformers(logits: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
    """The scores of one row after the warpers in the order of `generate`."""
    scores: Any = TemperatureLogitsWarper(params["temperature"])(None, logits)
    if params["top_k"]:
        scores = TopKLogitsWarper(params["top_k"])(None, scores)
    if params["top_p"] < 1.0:
        scores = TopPLogitsWarper(params["top_p"])(None, scores)
    if params["min_p"] > 0.0:
        warp: Any = MinPLogitsWarper(params["min_p"])
        scores = warp(None, scores)
    kept: torch.Tensor = scores
    return kept


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.2, 3.0),
        "top_k": st.integers(0, 60),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    }
)


@settings(max_examples=150, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=5), st.integers(0, 2**31))
def test_the_kept_tokens_are_those_of_transformers(params: list[dict[str, Any]], seed: int) -> None:
    logits = torch.randn(len(params), 50, generator=torch.Generator().manual_seed(seed)) * 3
    scores = filtered_scores(logits, make_rows(params, [0] * len(params), [0] * len(params)))
    for row, each in enumerate(params):
        expected = kept_by_transformers(logits[row : row + 1], each)[0]
        assert torch.equal(scores[row].isfinite(), expected.isfinite())
        torch.testing.assert_close(scores[row].softmax(-1), expected.softmax(-1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 0.9, "min_p": 0.1},
        {"temperature": 1.2, "top_p": 0.7},
        {"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_tokens_are_drawn_by_their_probabilities(params: dict[str, Any]) -> None:
    """Chi-square, at most 7 degrees of freedom: chance passes 24.3 once in a thousand."""
    num_draws = 20_000
    logits = torch.tensor([0.3, 1.2, -0.8, 2.0, 0.0, -2.5, 1.1, 0.4]).expand(num_draws, -1)
    rows = make_rows([params] * num_draws, [7] * num_draws, list(range(num_draws)))
    expected = filtered_scores(logits[:1], make_rows([params], [0], [0])).softmax(-1)[0] * num_draws
    counts = sample(logits, rows).bincount(minlength=8).double()
    assert counts[expected == 0].sum() == 0
    is_kept = expected > 0
    assert ((counts - expected)[is_kept] ** 2 / expected[is_kept]).sum() < 24.3


def test_sample_draws_a_flat_vocabulary_evenly() -> None:
    """Chi-square of 256 groups of 128 tokens: chance passes 330.5 once in a thousand."""
    num_draws, num_groups = 4096, 256
    logits = torch.zeros(1, 2**15).expand(num_draws, -1)
    tokens = sample(logits, make_rows([{"temperature": 1.0}] * num_draws, [3] * num_draws, list(range(num_draws))))
    counts = (tokens // 128).bincount(minlength=num_groups).double()
    expected = num_draws / num_groups
    assert ((counts - expected) ** 2 / expected).sum() < 330.5


def test_unlikely_tokens_win_as_often_as_they_should() -> None:
    """One token of 14 nats and 200,000 others that together have a sixth of its mass, each 1e-6."""
    num_draws = 1500
    row = torch.zeros(1, 200_001)
    row[:, 7] = 14.0
    logits = row.expand(num_draws, -1)
    rows = make_rows([{"temperature": 1.0}] * num_draws, list(range(num_draws)), [5] * num_draws)
    share = (sample(logits, rows) != 7).double().mean()
    expected = 200_000 / (200_000 + math.exp(14.0))
    assert abs(share - expected) < 3 * math.sqrt(expected * (1 - expected) / num_draws)


def test_a_row_gives_the_same_token_alone_and_among_others() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(5))
    params = [{}, {"temperature": 1.0}, {"temperature": 0.9, "top_k": 3}, {"temperature": 2.0, "top_p": 0.9}]
    params += [{"temperature": 1.0, "min_p": 0.2}, {"temperature": 0.5, "top_k": 50, "top_p": 0.5}]
    seeds, positions = [1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4]
    together = sample(logits, make_rows(params, seeds, positions))
    for row in range(6):
        alone = sample(
            logits[row : row + 1], make_rows(params[row : row + 1], seeds[row : row + 1], positions[row : row + 1])
        )
        assert alone[0] == together[row]
    assert together[0] == logits[0].argmax()


def test_noise_of_neighbours_is_unrelated() -> None:
    """Of neighbours among seeds, positions and tokens: 20 of each."""
    seeds, positions = torch.arange(-10, 10).repeat_interleave(20), torch.arange(20).repeat(20)
    noise = gumbels(seeds, positions, torch.arange(20)).double().view(20, 20, 20)
    assert len(set(noise.flatten().tolist())) > 7_990
    table = (-noise).exp().neg().exp() - 0.5  # uniform
    assert table.abs().max() < 0.5
    assert table.mean().abs() < 0.01
    for step in itertools.product((-1, 0, 1), repeat=3):
        if any(step):
            assert (table * table.roll(step, (0, 1, 2))).mean().abs() < 0.004, step  # 1/12 if they were the same


def test_noise_follows_the_gumbel_distribution_into_its_tail() -> None:
    noise = gumbels(torch.arange(16), torch.arange(16), torch.arange(2**17)).flatten().double()
    for bound in (-2.0, -1.0, 0.0, 1.0, 3.0, 6.0, 9.0, 12.0):
        expected = -math.expm1(-math.exp(-bound))
        deviation = math.sqrt(expected * (1 - expected) / len(noise))
        assert abs((noise > bound).double().mean() - expected) < 4 * deviation, bound


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (0, 0, 49 * math.log(2)),
        (0, 1 << 16, 48 * math.log(2) - math.log(1.5)),
        (2**32 - 1, 0, -math.log(25 * math.log(2))),
    ],
)
def test_noise_resolves_48_bits_of_its_words(first: int, second: int, expected: float) -> None:
    found = gumbels_of_words(torch.tensor([first]), torch.tensor([second]))
    assert found.item() == pytest.approx(expected, rel=1e-6)


def test_philox_gives_the_known_answers_of_its_authors() -> None:
    answers = [
        (0, 0, 0, 0xFF1DAE59, 0x6CD10DF2),
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0x2C3F628B, 0xAB4FD7AD),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0xDD7CE038, 0xF62A4C12),
    ]
    first, second, key, *expected = (torch.tensor(column) for column in zip(*answers, strict=True))
    found = philox(key, first, second)
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]


def test_noise_has_the_same_bits_on_every_machine_and_release() -> None:
    noise = gumbels(torch.tensor([0, 1, -1]), torch.tensor([0, 1, 2**40]), torch.tensor([0, 9, 2**31 - 1]))
    assert noise.view(torch.int32).tolist() == KNOWN_BITS


def test_sampled_tokens_change_only_with_the_version() -> None:
    """Raise `SAMPLING_VERSION` if these tokens change."""
    params = [{"temperature": 1.0, **each} for each in ({}, {"top_k": 9}, {"top_p": 0.5}, {"min_p": 0.3})] * 3
    logits = (torch.arange(12 * 40).view(12, 40) * 37 % 64) / 16
    tokens = sample(logits, make_rows(params, list(range(12)), list(range(5, 17)))).tolist()
    assert (SAMPLING_VERSION, tokens) == (2, RECORDED_TOKENS)


@pytest.mark.parametrize("params", [{}, {"top_k": 40}, {"top_p": 0.8}, {"min_p": 0.02}, {"top_k": 40, "top_p": 0.8}])
def test_native_race_equals_the_reference(params: dict[str, Any], isa: str) -> None:
    for num_items, temperature in ((1, 1.0), (7, 0.7), (33, 1.3), (5001, 0.9), (5001, 3.0)):
        logits = torch.randn(40, num_items, generator=torch.Generator().manual_seed(num_items)) * 3
        rows = make_rows([{"temperature": temperature, **params}] * 40, [9] * 40, list(range(40)))
        assert torch.equal(sample(logits, rows), sample_reference(logits, rows)), isa
        token_ids = torch.arange(num_items, dtype=torch.int32) * 5 + 3
        assert torch.equal(sample_drafts(logits, rows, token_ids), sample_reference(logits, rows, token_ids)), isa


def test_sample_without_native_kernels_races_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHOICE, "torch")
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(2))
    rows = make_rows([{"temperature": 1.0, "top_p": 0.9}] * 5, [4] * 5, list(range(5)))
    assert torch.equal(sample(logits, rows), sample_reference(logits, rows))


@pytest.mark.parametrize("scale", [0.25, 0.6])
def test_draft_samples_agree_with_the_target(scale: float) -> None:
    """A draft that is `distance` away in total variation agrees at least as often as (1 - distance) / (1 + distance).

    Its vocabulary holds every second token, which the target samples nearly always.
    """
    num_draws, generator = 2000, torch.Generator().manual_seed(8)
    token_ids = torch.arange(0, 2000, 2, dtype=torch.int32)
    target = torch.full((2000,), -9.0)
    target[token_ids.long()] = 8 - 1.3 * torch.randperm(1000, generator=generator).add(1).log() * 1.5
    draft = target[token_ids.long()] + scale * torch.randn(1000, generator=generator)
    rows = make_rows([{"temperature": 1.0}] * num_draws, [3] * num_draws, list(range(num_draws)))
    whole = torch.zeros(2000).index_copy(0, token_ids.long(), draft.softmax(-1))
    distance = (target.softmax(-1) - whole).abs().sum().item() / 2
    tokens = sample(target.expand(num_draws, -1), rows)
    drafts = sample_drafts(draft.expand(num_draws, -1), rows, token_ids)
    agreed = (tokens == drafts).double().mean().item()
    assert 0.05 < distance < 0.3
    assert agreed > (1 - distance) / (1 + distance) - 0.02


def test_sample_drafts_returns_tokens_of_the_target_when_greedy() -> None:
    logits, token_ids = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 1.0]]), torch.tensor([4, 70, 90], dtype=torch.int32)
    assert sample_drafts(logits, None, token_ids).tolist() == [70, 4]
    rows = make_rows([GREEDY, {"temperature": 1e-9}], [1, 2], [3, 4])
    assert sample_drafts(logits, rows, token_ids).tolist() == [70, 4]


def test_tiny_temperatures_and_impossible_logits_do_not_break_a_batch() -> None:
    logits = torch.randn(3, 20)
    logits[2] = float("nan")
    rows = make_rows(
        [{"temperature": 1e-30}, {"temperature": 1.0, "top_p": 1e-9}, {"temperature": 1.0}], [1, 2, 3], [0, 0, 0]
    )
    tokens = sample(logits, rows)
    assert tokens[0] == logits[0].argmax()
    assert tokens[1] == logits[1].argmax()
    assert 0 <= tokens[2] < 20


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.7}])
def test_tokens_that_tie_with_the_last_one_kept_stay(params: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 2.0, -1.0]])
    kept = filtered_scores(logits, make_rows([{"temperature": 1.0, **params}], [0], [0]))[0].isfinite()
    assert kept.tolist() == [False, True, True, True, False]


def test_logprobs_are_of_the_unscaled_distribution() -> None:
    logits = torch.randn(2, 30)
    chosen, values, ids = logprobs(logits, torch.tensor([4, 9]), 3)
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(chosen, expected[[0, 1], [4, 9]])
    torch.testing.assert_close(values, expected.sort(descending=True).values[:, :3])
    assert torch.equal(ids, expected.argsort(descending=True)[:, :3])
    assert logprobs(logits, torch.tensor([0, 0]), 99)[1].shape == (2, 30)


@pytest.mark.parametrize("num_greedy", [0, 3, 9])
@pytest.mark.parametrize("group_items", [1, 200, 1000])
def test_groups_of_rows_give_the_tokens_of_all_together(
    num_greedy: int, group_items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "GROUP_ITEMS", group_items)
    kinds: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.4}]
    params = [{**kinds[i % 5], "temperature": 0.5 + i / 5} for i in range(9 - num_greedy)]
    params[1:1] = [GREEDY] * num_greedy
    rows = make_rows(params, list(range(9)), list(range(40, 49)))
    for seed in range(20):
        logits = torch.randn(9, 97, generator=torch.Generator().manual_seed(seed))
        logits[:, 50:] = logits[:, 3:50]  # the first of equals is the best
        assert torch.equal(sample(logits, rows), sample_reference(logits, rows))
    assert torch.equal(sample(logits, None), logits.argmax(-1))
