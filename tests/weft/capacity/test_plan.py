"""The planner's memory is that of real files and real pools; its published figures are reproduced by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from tests.weft.model.test_quantized import FP8, INT4, quantized
from tests.weft.tiny_families import FAMILIES, TinyFamily
from tests.weft.tiny_llama import Tiny

from weft.capacity.footprint import TensorKind, footprint
from weft.capacity.layout import GPUS, UNBOUNDED, Demand, Gpu, PipelineStage, check_layout, layouts
from weft.capacity.plan import FUSED_ROWS, CapacityPlan, make_plan
from weft.kv.layer_groups import AttentionSpan, PagingPolicy
from weft.model.config import expected_tensors, read_config
from weft.model.kv_layout import block_bytes, kv_groups, token_numbers
from weft.model.sharding import BadPlan, Layout
from weft.model.spec import ModelConfig
from weft_kernels.packed import pack_f12

CONFIGS = Path(__file__).parents[1] / "model/configs"
NANO = Path(__file__).parents[3] / "models/weft-nano"
SCOUT, KIMI, LLAMA = (read_config(CONFIGS / name) for name in ("llama4-scout", "kimi-k2.5", "llama3-8b"))


def plan(config: ModelConfig, gpu: str, layout: Layout, context: int = 8192, dtype: str = "bfloat16") -> CapacityPlan:
    return make_plan(config, layout, Demand(GPUS[gpu], layout.num_gpus, context, dtype))


def file_bytes(directory: Path, config: ModelConfig) -> int:
    """Of the tensors that the model is made of, without the file's header."""
    total = 0
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors = (file.get_tensor(name) for name in file.keys() if name in expected_tensors(config))  # noqa: SIM118
            total += sum(tensor.nbytes for tensor in tensors)
    return total


def stored(config: ModelConfig) -> int:
    return sum(weight.size_bytes for weight in footprint(config).values())


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_the_bytes_of_the_file(name: str, family_of: Callable[[str], TinyFamily]) -> None:
    tiny = family_of(name)
    assert stored(tiny.config) == file_bytes(tiny.directory, tiny.config) > 0
    one = plan(tiny.config, "h200", Layout(), 64, "float32").stages[0]
    assert one.weights == stored(tiny.config)
    assert sum(weight.params for weight in footprint(tiny.config).values()) * 4 == stored(tiny.config)


@pytest.mark.parametrize(("name", "fields"), [("deepseek", FP8), ("kimi-k2", INT4), ("qwen3-moe", FP8)])
def test_packed_weights_are_the_bytes_of_the_file(
    name: str, fields: dict[str, object], family_of: Callable[[str], TinyFamily], tmp_path: Path
) -> None:
    plain = family_of(name)
    tiny = quantized(plain, fields, tmp_path / "packed")
    assert stored(tiny.config) == file_bytes(tiny.directory, tiny.config) < stored(plain.config)
    for key, weight in footprint(plain.config).items():
        # eight numbers to a word: the last word of a row of 20 holds four that are none
        assert weight.params <= footprint(tiny.config)[key].params <= weight.params * 24 / 20


def test_the_shipped_model_is_its_file() -> None:
    config = read_config(NANO)
    assert stored(config) == file_bytes(NANO, config)
    assert plan(config, "l40s", Layout(), 64, "float32").stages[0].weights == 2 * stored(config)


def test_resident_weights_are_planned_as_what_f12_takes_at_most() -> None:
    config, held = read_config(NANO), 0
    for weight in load_file(NANO / "model.safetensors").values():
        held += pack_f12(weight).nbytes if weight.ndim == 2 else weight.nbytes
    planned = sum(weight.size_bytes for weight in footprint(config, "bfloat16", is_resident=True).values())
    assert held <= planned <= 0.756 * stored(config)


def test_resident_weights_are_plain_matrices_of_bfloat16_alone() -> None:
    plain, packed, wide = (footprint(SCOUT, dtype, True) for dtype in ("float16", "bfloat16", "float32"))
    experts, norms = (0, TensorKind.EXPERTS), (0, TensorKind.WHOLE)
    assert packed[experts].size_bytes == math.ceil(0.755 * plain[experts].size_bytes)
    assert packed[norms] == plain[norms]  # with the router
    assert wide[experts].size_bytes == 2 * plain[experts].size_bytes
    held, fewer = (sum(each.size_bytes for each in footprint(KIMI, "bfloat16", way).values()) for way in (False, True))
    assert held > fewer > held - 0.245 * 2 * 13e9  # attention, dense and shared experts, embedding and head


@pytest.mark.parametrize("name", ["llama2", "qwen3", "mixtral", "deepseek"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_is_that_of_the_pools_blocks(name: str, dtype: str, family_of: Callable[[str], TinyFamily]) -> None:
    config = family_of(name).config
    stage = plan(config, "h200", Layout(), 64, dtype).stages[0]
    assert (
        stage.kv_bytes_read(64)
        == stage.growing * 64
        == stage.kv_bytes_per_sequence(64)
        == block_bytes(config, dtype, 64)
    )
    assert stage.kv_bytes_per_sequence(65) == 2 * stage.page


@pytest.mark.parametrize("name", ["mistral-window", "llama4", "qwen2-window"])
def test_layers_with_a_window_grow_no_further(name: str, family_of: Callable[[str], TinyFamily]) -> None:
    config = family_of(name).config
    stage = plan(config, "h200", Layout(), 64, "float32").stages[0]
    groups = kv_groups(config)
    assert stage.kv_bytes_per_sequence(8) == block_bytes(config, "float32", 64) * len(groups.spans)
    assert stage.kv_bytes_read(8) == block_bytes(config, "float32", 8) * len(groups.spans)
    num_bounded = sum(bool(layer.window or layer.chunk) for layer in config.layers)
    layer_bytes = token_numbers(config, config.layers[0]) * 4
    assert stage.kv_bytes_read(1000) - stage.kv_bytes_read(100) == 900 * layer_bytes * (config.num_layers - num_bounded)


def test_a_tied_model_has_one_table_on_one_stage_and_two_on_two(tiny_of: Callable[[str], Tiny]) -> None:
    config = replace(LLAMA, is_tied=True)
    table = config.vocab_size * config.hidden_size * 2
    whole = plan(config, "h200", Layout()).stages[0].weights
    first, last = plan(config, "h200", Layout(pp=2)).stages
    assert whole == stored(config) == stored(LLAMA) - table
    assert first.weights + last.weights == whole + table


def test_scout_on_two_h200_has_room_for_more_than_a_million_tokens() -> None:
    """48 layers of 16 experts; 12 of the layers are global, 36 keep 8,192 tokens."""
    experts = 48 * 16 * 3 * 5120 * 8192
    others = 48 * (2 * 5120 * 5120 + 2 * 5120 * 1024 + 3 * 5120 * 8192 + 16 * 5120 + 2 * 5120)
    assert stored(SCOUT) == 2 * (experts + others + 2 * 202048 * 5120 + 5120)
    found = plan(SCOUT, "h200", Layout(tp=2))
    stage = found.stages[0]
    assert found.kv_gib >= 56
    assert found.max_context >= 1_200_000
    assert stage.growing == 12 * 4 * 2 * 128 * 2
    assert stage.bounded == ((36 * 4 * 2 * 128 * 2, 8192),)
    # one group of 12 layers grows; three keep a chunk and two steps of 2,048 tokens, beside a chunk found
    assert stage.page == 64 * stage.growing
    assert found.max_context == (stage.kv // stage.page - 3 * (128 + 192)) * 64
    assert not plan(SCOUT, "h200", Layout()).fits


def test_kimi_on_eight_h100_leaves_thirty_gib() -> None:
    counted = footprint(KIMI)
    experts = sum(each.size_bytes for (_, kind), each in counted.items() if kind is TensorKind.EXPERTS)
    numbers = 60 * 384 * 3 * 7168 * 2048
    assert experts == numbers // 2 + 2 * numbers // 32 + 60 * 384 * 3 * 2 * 8
    assert 555e9 < sum(each.size_bytes for each in counted.values()) < 595e9
    assert 1.02e12 < sum(each.params for each in counted.values()) < 1.03e12
    found = plan(KIMI, "h100", Layout(tp=8, ep=8))
    assert found.kv_gib >= 30
    assert found.fits
    assert found.stages[0].growing == 61 * 576 * 2  # one latent for all heads: TP does not divide it


@pytest.mark.parametrize(("config", "num_gpus"), [(LLAMA, 8), (SCOUT, 8), (KIMI, 16)])
def test_shares_add_up_whatever_the_layout(config: ModelConfig, num_gpus: int) -> None:
    """What is divided is there once; what stands on every GPU, as often as there are GPUs of its stage."""
    total: dict[TensorKind, int] = {}
    for (_, kind), weight in footprint(config, "bfloat16").items():
        total[kind] = total.get(kind, 0) + weight.size_bytes
    for layout in layouts(config, num_gpus):
        assert layout.num_gpus == num_gpus
        expected = 0
        for kind, size in total.items():
            whole = layout.stage_gpus if kind is TensorKind.WHOLE else layout.replicas
            copies = layout.tp // min(layout.tp, config.num_kv_heads) if kind is TensorKind.KEYS_VALUES else 1
            expected += size * (1 if kind is TensorKind.EXPERTS else whole * copies)
        found = sum(stage.weights for stage in plan(config, "b200", layout).stages) * layout.stage_gpus
        assert expected <= found < expected + num_gpus * 10_000  # shares are rounded up


REACHES = st.builds(AttentionSpan, window=st.integers(0, 3000)) | st.builds(AttentionSpan, chunk=st.integers(0, 3000))
STAGES = st.builds(
    PipelineStage,
    layers=st.just(range(4)),
    weights=st.just(0),
    activations=st.just(0),
    reserve=st.just(0),
    memory=st.integers(0, 10**6),
    growing=st.just(0),
    bounded=st.just(()),
    page=st.integers(1, 500),
    paging=st.builds(
        PagingPolicy,
        spans=st.lists(REACHES, min_size=1, max_size=4).map(tuple),
        block_tokens=st.integers(1, 64),
        chunk_tokens=st.integers(1, 512),
    ),
)


@given(STAGES)
def test_the_longest_sequence_fits_and_the_next_one_does_not(stage: PipelineStage) -> None:
    longest = stage.max_context()
    taken = [stage.page * stage.paging.max_pages(count) for count in (longest, min(longest + 1, UNBOUNDED))]
    assert taken[0] <= stage.kv
    assert taken[1] > stage.kv or longest == UNBOUNDED
    assert stage.kv_bytes_per_sequence(longest) <= stage.kv


def test_limits_are_those_of_the_roofline_made_by_hand() -> None:
    """The 8B model at a context of 1k on an H200 as measured: 4.3 TB/s, 790 TFLOP/s."""
    demand = Demand(Gpu("measured", 139.7, 4.3, 790, 67), 1, 1024, "bfloat16")
    limits = make_plan(LLAMA, Layout(), demand).roofline
    for batch, expected in {1: 284, 8: 2140, 32: 7100, 64: 11_700}.items():
        assert limits.decode(batch) == pytest.approx(expected, rel=0.03)
    assert limits.prefill() == pytest.approx(790e12 / (2 * 6.98e9 + 32 * 32 * 512 * 512), rel=0.02)


def test_few_tokens_read_few_experts_and_many_read_all() -> None:
    limits = plan(KIMI, "b200", Layout(tp=8, ep=8)).roofline
    assert limits.touched(1) == pytest.approx(8 / 384)
    assert limits.touched(2) < 2 * 8 / 384
    assert limits.touched(4096) == pytest.approx(1)


def test_two_stages_answer_one_sequence_no_faster_and_many_twice_as_fast() -> None:
    one, two = (plan(LLAMA, "h200", Layout(pp=pp), 1024).roofline for pp in (1, 2))
    assert two.decode(1) == pytest.approx(one.decode(1), rel=1e-6)
    assert two.decode(64) == pytest.approx(2 * one.decode(32), rel=0.1)


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (LLAMA, Layout(tp=3), "--tp: 3 does not divide 32 heads"),
        (SCOUT, Layout(tp=20), "--tp: 20 and 8 key heads"),
        (LLAMA, Layout(pp=33), "--pp: 33 stages for 32 layers"),
        (LLAMA, Layout(ep=2), "--ep: LlamaForCausalLM has no experts"),
        (SCOUT, Layout(ep=3), "--ep: 3 does not divide 16 experts"),
        (KIMI, Layout(tp=4, ep=6), "--ep: 6 and --tp 4"),
        (LLAMA, Layout(tp=2), "--gpus: TP2 PP1 EP1 takes 2 GPUs, not 4"),
    ],
)
def test_layouts_that_cannot_be_name_the_option(config: ModelConfig, layout: Layout, message: str) -> None:
    with pytest.raises(BadPlan, match=message):
        check_layout(config, layout, 4)


def test_a_model_larger_than_its_gpus_does_not_fit() -> None:
    found = plan(KIMI, "l40s", Layout(tp=8, ep=8))
    assert not found.fits
    assert (found.kv_gib, found.max_context, found.sequences, found.decode) == (0, 0, 0, ())


def test_what_latent_attention_takes_apart_is_counted_unpacked(
    family_of: Callable[[str], TinyFamily], tmp_path: Path
) -> None:
    tiny = quantized(family_of("deepseek"), FP8, tmp_path / "packed")
    latent, config = tiny.config.latent, tiny.config
    assert latent is not None
    numbers = config.num_heads * (latent.nope_dim + latent.value_dim) * latent.kv_rank
    factors = 4 * -(-config.num_heads * (latent.nope_dim + latent.value_dim) // 16) * -(-latent.kv_rank // 12)
    as_stored, held = footprint(config), footprint(config, "float32")
    each = held[0, TensorKind.ATTENTION].size_bytes - as_stored[0, TensorKind.ATTENTION].size_bytes
    assert each == 4 * numbers - (numbers + factors)


def test_plan_unpacks_from_as_many_rows_as_the_kernels() -> None:
    packed_linear = pytest.importorskip("weft_kernels.packed.linear", exc_type=ImportError)
    assert FUSED_ROWS == packed_linear.MAX_FUSED_ROWS
