"""The sampling kernel draws the reference's tokens: same filters, same noise bit for bit, same order of equals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.device import DEVICE
from tests.kernels.test_sampling import make_rows

pytest.importorskip("triton")

import triton
import triton.language as tl

from weft_kernels import sampling
from weft_kernels.sampling import SamplingRows, race_kernel, top_k_p_search
from weft_kernels.sampling.kernel import sample_kernel
from weft_kernels.sampling.noise import gumbels
from weft_kernels.sampling.reference import sample_reference

# numpy, which the interpreter computes with, warns where floats overflow or are NaN; here they shall.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 3.0},
    "top-k": {"temperature": 0.8, "top_k": 7},
    "top-k of one": {"temperature": 1.0, "top_k": 1},
    "top-k of all": {"temperature": 1.0, "top_k": 10**6},
    "top-p": {"temperature": 1.1, "top_p": 0.6},
    "top-p of nearly all": {"temperature": 1.0, "top_p": 0.99999994},
    "tiny top-p": {"temperature": 1.0, "top_p": 1e-9},
    "min-p": {"temperature": 1.3, "min_p": 0.2},
    "all": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "cold": {"temperature": 1e-30},
}


@pytest.fixture(autouse=True)
def _few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a block of one item as for a large one."""
    monkeypatch.setattr(top_k_p_search, "BLOCK_ITEMS", 2048)


def run(logits: Tensor, rows: SamplingRows, token_ids: Tensor | None = None) -> Tensor:
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    moved = replace(rows, **{name: getattr(rows, name).to(DEVICE) for name in names})
    return sample_kernel(logits.to(DEVICE), moved, None if token_ids is None else token_ids.to(DEVICE)).cpu()


@triton.jit  # type: ignore[untyped-decorator]
def store_noise(p_noise: Tensor, seed: int, position: int, token: int, SIZE: tl.constexpr) -> None:
    o_item = tl.arange(0, SIZE)
    b_noise = race_kernel._gumbels(tl.cast(seed, tl.int64), tl.cast(position, tl.int64), (token + o_item).to(tl.uint32))
    tl.store(p_noise + o_item, b_noise)


@pytest.mark.parametrize(("seed", "position", "token"), [(0, 0, 0), (-5, 2**40, 250_000), (2**62, -1, 2**31 - 4096)])
def test_noise_has_the_bits_of_the_reference(seed: int, position: int, token: int) -> None:
    noise = torch.empty(4096, device=DEVICE)
    store_noise[(1,)](noise, seed, position, token, SIZE=4096, enable_fp_fusion=False)
    expected = gumbels(torch.tensor([seed]), torch.tensor([position]), torch.arange(token, token + 4096))[0]
    assert torch.equal(noise.cpu(), expected)


def test_drafts_are_those_of_the_reference() -> None:
    params = list(PARAMS.values())
    logits = torch.randn(len(params), 5000, generator=torch.Generator().manual_seed(6)) * 4
    rows, token_ids = make_rows(params, [2] * len(params), [9] * len(params)), torch.arange(5000, dtype=torch.int32) * 7
    assert torch.equal(run(logits, rows, token_ids), sample_reference(logits, rows, token_ids))


@pytest.mark.parametrize("num_items", [3, 997, 5000])
def test_tokens_are_those_of_the_reference(num_items: int) -> None:
    """One row for each way to sample, all in one launch; once where the interpreter takes seconds for it."""
    params = list(PARAMS.values())
    for seed in range(3) if DEVICE == "cuda" else [num_items % 5]:
        logits = torch.randn(len(params), num_items, generator=torch.Generator().manual_seed(seed)) * 4
        rows = make_rows(params, list(range(seed, seed + len(params))), [seed * 100 - 7] * len(params))
        assert torch.equal(run(logits, rows), sample_reference(logits, rows))


@pytest.mark.parametrize("params", [PARAMS["plain"], PARAMS["all"], PARAMS["top-p"]], ids=["plain", "all", "top-p"])
def test_many_draws_from_one_row_are_those_of_the_reference(params: dict[str, Any]) -> None:
    logits = (torch.randn(60, generator=torch.Generator().manual_seed(1)) * 2).expand(12, -1)
    rows = make_rows([params] * 12, [11] * 12, list(range(12)))
    tokens = run(logits.contiguous(), rows)
    assert torch.equal(tokens, sample_reference(logits, rows))
    assert len(set(tokens.tolist())) > 3


def test_as_a_gpu_takes_them_in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_k_p_search, "BLOCK_ITEMS", 256)
    logits = torch.randn(2, 4500, generator=torch.Generator().manual_seed(4)) * 4
    rows = make_rows([PARAMS["all"], PARAMS["top-p"]], [8, 9], [1, 2])
    assert torch.equal(run(logits, rows), sample_reference(logits, rows))


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.7}])
def test_tokens_that_tie_with_the_last_one_kept_stay(params: dict[str, Any]) -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, 2.0, -1.0]).expand(12, -1).contiguous()
    rows = make_rows([{"temperature": 1.0, **params}] * 12, [5] * 12, list(range(12)))
    assert set(run(logits, rows).tolist()) == {1, 2, 3}


def test_a_top_p_just_below_one_keeps_a_flat_vocabulary_whole() -> None:
    """Sums of single precision stay below so large a share of all."""
    logits = torch.zeros(3, 20_000)
    logits[:, 0] = 3.0
    rows = make_rows([PARAMS["top-p of nearly all"]] * 3, [3] * 3, list(range(3)))
    assert torch.equal(run(logits, rows), sample_reference(logits, rows))


def test_forbidden_tokens_are_never_drawn_and_bad_logits_break_nothing() -> None:
    logits = torch.full((6, 50), float("-inf"))
    logits[:, 17] = 1.0
    logits[3] = float("nan")
    logits[4] = float("-inf")
    params = [PARAMS[name] for name in ("plain", "all", "top-k of all", "plain", "top-p", "greedy")]
    tokens = run(logits, make_rows(params, [1] * 6, list(range(6))))
    assert tokens[[0, 1, 2, 5]].tolist() == [17] * 4
    assert bool(((tokens >= 0) & (tokens < 50)).all())


def test_the_first_of_equal_logits_is_the_greedy_one() -> None:
    logits = torch.zeros(1, 9000)
    logits[0, [5, 4097, 8200]] = 2.0
    assert run(logits, make_rows([{}], [0], [0])).tolist() == [5]


def test_what_is_drawn_to_have_it_compiled_takes_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[SamplingRows] = []

    def keep(logits: Tensor, rows: SamplingRows) -> Tensor:
        drawn.append(rows)
        return run(logits, rows)

    monkeypatch.setattr(sampling, "sample", keep)
    sampling.compile_sampling(20, torch.device("cpu"))
    assert [(rows.has_top_k, rows.has_top_p) for rows in drawn] == [(False, False), (True, True)]
    assert all(bool((rows.temperature > 0) & (rows.top_k > 0) & (rows.top_p < 1)) for rows in drawn)


@pytest.mark.gpu
def test_a_whole_vocabulary_on_the_device() -> None:
    params = list(PARAMS.values()) * 8
    logits = torch.randn(len(params), 128_256, generator=torch.Generator().manual_seed(2)) * 4
    rows = make_rows(params, list(range(len(params))), [3] * len(params))
    agreed = (run(logits, rows) == sample_reference(logits, rows)).double().mean()
    assert agreed > 0.97  # exp rounds differently: the threshold of a top-p may move by 1e-7
