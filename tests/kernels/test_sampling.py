"""Sampling keeps the tokens that transformers keeps, draws by their probabilities, and depends on nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from weft_kernels import sampling
from weft_kernels.sampling import SamplingRows, logprobs, sample
from weft_kernels.sampling.reference import filtered_scores, sample_reference, uniforms

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
    [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.5, "top_p": 0.8, "min_p": 0.05}],
)
def test_tokens_are_drawn_by_their_probabilities(params: dict[str, Any]) -> None:
    """Chi-square, at most 7 degrees of freedom: chance passes 24.3 once in a thousand, and the seed is fixed."""
    num_draws = 20_000
    logits = torch.tensor([0.3, 1.2, -0.8, 2.0, 0.0, -2.5, 1.1, 0.4]).expand(num_draws, -1)
    rows = make_rows([params] * num_draws, [7] * num_draws, list(range(num_draws)))
    expected = filtered_scores(logits[:1], make_rows([params], [0], [0])).softmax(-1)[0] * num_draws
    counts = sample(logits, rows).bincount(minlength=8).double()
    assert counts[expected == 0].sum() == 0
    is_kept = expected > 0
    assert ((counts - expected)[is_kept] ** 2 / expected[is_kept]).sum() < 24.3


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


def test_seeds_and_positions_each_change_the_noise_and_neighbours_are_unrelated() -> None:
    seeds = torch.arange(-50, 50).repeat_interleave(100)
    positions = torch.arange(100).repeat(100)
    noise = uniforms(seeds, positions)
    assert len(set(noise.tolist())) == 10_000
    assert noise.min() >= 0
    assert noise.max() < 1
    assert (noise.mean() - 0.5).abs() < 0.02
    table = noise.view(100, 100) - 0.5
    for shifted in (table.roll(1, 0), table.roll(1, 1), table.roll((1, 1), (0, 1)), table.roll((1, -1), (0, 1))):
        assert (table * shifted).mean().abs() < 0.005  # 1/12 if they were the same


def test_the_noise_is_the_same_on_every_machine_and_release() -> None:
    noise = uniforms(torch.tensor([0, 1, -1]), torch.tensor([0, 1, 2**40]))
    assert noise.tolist() == [0.6524484863740322, 0.9435642308648544, 0.5440041384053076]


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
