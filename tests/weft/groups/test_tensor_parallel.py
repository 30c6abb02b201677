"""Ranks of a group compute together what one device computes, for every family and layout that divides it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from tests.weft.groups.threads import ThreadComm, on_all_ranks, shared_comms
from tests.weft.model.packers import FORMATS, pack
from tests.weft.model.test_families import NUM_TOKENS, decoder_logits
from tests.weft.model.test_quantized import quantized
from tests.weft.tiny_families import FAMILIES, TinyFamily
from weft.errors import BadCheckpoint
from weft.model.decoder import Decoder
from weft.model.group_rank import GroupRank
from weft.model.sharding import BadPlan, Layout, Shard, check_cuts, layout_problem
from weft.model.spec import ModelConfig
from weft.model.tensors import expected_tensors
from weft_kernels.collectives.shared import SharedComm

# some of those that one native call computes, also as halves
FUSED = ("llama2", "qwen2", "mistral-window", "smollm3")
Family = Callable[[str], TinyFamily]
LAYOUTS = [Layout(2), Layout(4), Layout(3), Layout(2, 1, 2), Layout(4, 1, 2), Layout(3, 1, 3)]


def layouts_of(config: ModelConfig) -> list[Layout]:
    """Return the layouts that divide the model; there is at least one."""
    found = [each for each in LAYOUTS if not layout_problem(config, each)]
    assert found
    return found


def alone(tiny: TinyFamily) -> torch.Tensor:
    """Return the logits of one device."""
    return decoder_logits(Decoder(tiny.config, tiny.weights, torch.float32, torch.device("cpu")), NUM_TOKENS)


def group_logits(
    tiny: TinyFamily, layout: Layout, chunk: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, list[tuple[str, tuple[int, ...]]]]:
    """Return the leader's logits of all tokens, and the collectives of one rank."""
    weights = tiny.weights

    def work(comm: ThreadComm) -> torch.Tensor:
        rank = GroupRank(Shard(layout, comm.rank), comm)
        return decoder_logits(Decoder(tiny.config, weights, dtype, torch.device("cpu"), rank=rank), chunk)

    found, meeting = on_all_ranks(layout.stage_gpus, work)
    return found[0], meeting.calls


@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_compute_together_what_one_device_does(name: str, family_of: Family) -> None:
    tiny = family_of(name)
    expected = alone(tiny)
    for layout in layouts_of(tiny.config):
        found, _ = group_logits(tiny, layout, NUM_TOKENS)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.std()), msg=str(layout))


@pytest.mark.parametrize("name", FAMILIES)
def test_shared_memory_and_fused_layers_give_the_same_bits(name: str, family_of: Family) -> None:
    tiny, layout, cpu = family_of(name), layouts_of(family_of(name).config)[0], torch.device("cpu")
    weights, comms = tiny.weights, shared_comms(layout.stage_gpus)

    def work(comm: SharedComm) -> tuple[bool, torch.Tensor]:
        model = Decoder(tiny.config, weights, torch.float32, cpu, rank=GroupRank(Shard(layout, comm.rank), comm))
        return model.dense is not None, decoder_logits(model, 4)

    with ThreadPoolExecutor(len(comms)) as pool:
        (is_fused, found), *others = pool.map(work, comms)
    assert all(each == is_fused for each, _ in others)
    assert is_fused or name not in FUSED
    assert torch.equal(found, group_logits(tiny, layout, 4)[0])


@pytest.mark.parametrize("form", FORMATS)
def test_packed_weights_are_cut_or_refused_before_loading(form: str, family_of: Family, tmp_path: Path) -> None:
    tiny = quantized(family_of("llama2"), FORMATS[form], tmp_path / "packed", pack)
    expected = alone(tiny)
    for layout in (Layout(2), Layout(4)):
        try:
            check_cuts(tiny.config, layout)
        except BadPlan:
            with pytest.raises((BadCheckpoint, ValueError), match=r"cuts a block|is not inside"):
                group_logits(tiny, layout, NUM_TOKENS)
            continue
        found, _ = group_logits(tiny, layout, NUM_TOKENS)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.std()), msg=str(layout))


def num_copies(name: str, config: ModelConfig, layout: Layout, is_cut: bool) -> int:
    """Return on how many ranks each number of a tensor is."""
    if any(each in name for each in (".k_proj.", ".v_proj.", ".k_norm.")) and is_cut:
        return max(1, layout.tp // config.num_kv_heads)
    if name.endswith("experts.down_proj_bias"):
        return layout.stage_gpus // layout.ep
    return 1 if is_cut else layout.stage_gpus


def count_ranks(name: str, shape: tuple[int, ...], config: ModelConfig, layout: Layout) -> torch.Tensor:
    """Return for each number of a tensor how many ranks hold it."""
    counts = torch.zeros(shape, dtype=torch.int32)
    for shard in (Shard(layout, place) for place in range(layout.stage_gpus)):
        part = shard.slices(config).get(name)
        if part is None:
            counts += name not in shard.missing(config)
            continue
        inside = counts if part.experts is None else counts[slice(*part.experts)]
        for start, stop in part.ranges:
            inside.narrow(part.dim, start, stop - start).add_(1)
    return counts


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_all_ranks_tile_every_tensor(name: str, family_of: Family) -> None:
    config = family_of(name).config
    for layout in layouts_of(config):
        for tensor, shape in expected_tensors(config).items():
            is_cut = any(tensor in Shard(layout, place).slices(config) for place in range(layout.stage_gpus))
            counts = count_ranks(tensor, shape, config, layout)
            copies = [num_copies(tensor, config, layout, is_cut)]
            if layout.tp > config.num_kv_heads and any(each in tensor for each in ("qkv_proj", "query_key_value")):
                copies = [1, layout.tp // config.num_kv_heads]  # of queries, of keys and values
            assert sorted(set(counts.flatten().tolist())) == copies, (tensor, layout)


@pytest.mark.parametrize("name", ["llama2", "olmo2", "gpt-oss", "qwen3-moe", "deepseek-plain", "llama4"])
def test_sums_are_those_that_the_plan_counts(name: str, family_of: Family) -> None:
    """Two sums a layer and one of the embeddings, each of all rows; wide head norms have one more."""
    tiny = family_of(name)
    layout = layouts_of(tiny.config)[0]
    _, calls = group_logits(tiny, layout, NUM_TOKENS)
    config = tiny.config
    wide = config.num_layers * (config.head_norm.value == "wide")
    sums = [shape for kind, shape in calls if kind == "sum"]
    assert len(sums) == 2 * config.num_layers + 1 + wide
    stream = NUM_TOKENS * config.hidden_size
    assert sum(map(prod, sums)) == (2 * config.num_layers + 1) * stream + wide * NUM_TOKENS * 2
    assert len(calls) == len(sums) + 1


@pytest.mark.parametrize("name", ["llama2", "mistral-window", "qwen3-moe", "deepseek-plain"])
def test_bits_do_not_depend_on_the_chunks(name: str, family_of: Family) -> None:
    """As on one device; latent attention computes long chunks otherwise, and rounds otherwise."""
    tiny = family_of(name)
    for layout in layouts_of(tiny.config):
        assert torch.equal(group_logits(tiny, layout, 5)[0], group_logits(tiny, layout, 1)[0])


def test_layouts_that_do_not_divide_are_refused(family_of: Family) -> None:
    config = family_of("llama2").config
    assert "does not divide 4 heads" in layout_problem(config, Layout(3))
    with pytest.raises(BadPlan, match="--tp: 4 ranks cannot share intermediate_size 3"):
        check_cuts(replace(config, intermediate_size=3), Layout(4))
    with pytest.raises(BadPlan, match="too many for a vocabulary of 5"):
        check_cuts(replace(config, vocab_size=5), Layout(4))
    check_cuts(config, Layout(4))
