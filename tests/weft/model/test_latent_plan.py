"""Prompts with latent attention take turns at one workspace: as much memory as the longest of them, however many."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from weft.capacity.layout import GPUS, Demand
from weft.capacity.plan import make_plan
from weft.model import spec
from weft.model.config import read_config
from weft.model.sharding import Layout
from weft.model.spec import WORKSPACE_BYTES, Latent
from weft.model.step import LatentPlan, plan_latent
from weft_kernels.layer_cache import uniform_pool
from weft_kernels.paged_attention import PagedBatch

CONFIGS = Path(__file__).parent / "configs"
BLOCK_TOKENS, NUM_HEADS = 16, 8
# as Kimi's, but for the heads; keys are made from 187 rows on
LATENT = Latent(q_rank=0, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, scale=1.0)


def plan_of(*lengths: int) -> LatentPlan:
    """Whole prompts of so many tokens, in one step."""
    pool = torch.zeros(1, 1, 1, 1, BLOCK_TOKENS, LATENT.kv_rank + LATENT.rope_dim, dtype=torch.bfloat16)
    starts = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    tables = [[0] * -(-length // BLOCK_TOKENS) for length in lengths]
    return plan_latent(LATENT, PagedBatch(uniform_pool(pool), NUM_HEADS, starts, list(lengths), tables))


def test_sequences_that_decode_expand_no_keys() -> None:
    pool = torch.zeros(1, 1, 1, 1, BLOCK_TOKENS, LATENT.kv_rank + LATENT.rope_dim, dtype=torch.bfloat16)
    batch = PagedBatch(uniform_pool(pool), NUM_HEADS, [0, 200, 400], [200, 250], [[0] * 13, [0] * 16], [False, True])
    plan = plan_latent(LATENT, batch)
    assert [each.rows for each in plan.expanded] == [slice(0, 200)]
    assert plan.absorbed is not None
    rows, absorbed = plan.absorbed
    assert rows.tolist() == list(range(200, 400))
    assert list(absorbed.decodes) == [True]


def test_plan_carries_the_first_visible_slots() -> None:
    pool = torch.zeros(1, 1, 1, 1, BLOCK_TOKENS, LATENT.kv_rank + LATENT.rope_dim, dtype=torch.bfloat16)
    tables, first = [range(20, 36), range(2), range(40, 56)], [37, 3, 32]
    batch = PagedBatch(uniform_pool(pool), NUM_HEADS, [0, 200, 201, 401], [250, 18, 251], tables, first=first)
    plan = plan_latent(LATENT, batch)
    assert plan.absorbed is not None
    assert plan.absorbed[1].first == [3]
    # Blocks that lie below it as a whole are not expanded.
    assert [each.blocks.tolist() for each in plan.expanded] == [[*range(22, 36)], [*range(42, 56)]]
    assert [each.batch.first_at(0) for each in plan.expanded] == [5, 0]
    assert [list(each.batch.context_lens) for each in plan.expanded] == [[218], [219]]


def held_bytes(plan: LatentPlan) -> int:
    stores = {each.batch.pool.memory.untyped_storage().data_ptr(): each.batch.pool.memory for each in plan.expanded}
    return sum(pool.untyped_storage().nbytes() for pool in stores.values())


def test_keys_are_made_from_187_rows_on() -> None:
    assert LATENT.min_expanded_rows == 187
    plan = plan_of(187, 186, 1)
    assert [each.rows for each in plan.expanded] == [slice(0, 187)]
    assert plan.absorbed is not None
    assert plan.absorbed[0].tolist() == list(range(187, 374))
    assert not plan_of(186, 5).expanded


@pytest.mark.parametrize("lengths", [(300,) * 8, (200, 900, 187), (900, 200, 3, 187)])
def test_many_prompts_hold_what_the_longest_of_them_does(lengths: tuple[int, ...]) -> None:
    many, longest = plan_of(*lengths), plan_of(max(lengths))
    assert len(many.expanded) == sum(length >= 187 for length in lengths)
    assert held_bytes(many) == held_bytes(longest) > 0


def test_the_plan_counts_the_workspace_and_what_is_made_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(CONFIGS / "kimi-k2.5")
    assert config.latent is not None
    config = replace(config, max_positions=4096)

    def activations(chunk_tokens: int) -> int:
        demand = Demand(GPUS["b200"], 1, 4096, "bfloat16", chunk_tokens=chunk_tokens)
        return make_plan(config, Layout(), demand).stages[0].activations

    monkeypatch.setattr(spec.Latent, "min_expanded_rows", 1 << 62)
    without = activations(2048)
    monkeypatch.setattr(spec.Latent, "min_expanded_rows", 187)
    # half as much again and a sixth: products of 128 numbers each, for keys and values of 192
    made, vectors = WORKSPACE_BYTES * 5 // 3, 4096 * 576 * 2
    assert activations(2048) - without == pytest.approx(made + vectors, abs=1)
    assert activations(186) < without
