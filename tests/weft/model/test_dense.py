"""All layers in one call give what they give one by one, to the last bit, in every dense family."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.device import ISAS
from tests.weft.engine.harness import Driver
from tests.weft.tiny_families import FAMILIES, TinyFamily, make_family
from weft.model.decoder import Decoder, DecoderLayer
from weft.model.kv_layout import block_bytes, kv_groups
from weft.model.paged_pool import paged_pool
from weft.model.spec import FINAL, ModelConfig
from weft.model.step import Capture, TokenBatch
from weft_kernels.linear.packed12 import Packed12
from weft_kernels.native import CHOICE
from weft_kernels.paged_attention import PagedBatch

pytestmark = pytest.mark.skipif(not ISAS, reason="no build for this processor")
NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16]
# heads, key heads and sizes: odd counts, all the ratios that attention tells apart, panels that are not full
WHOLE_VECTORS = {"hidden_size": 64, "head_dim": 32}
LONG_FACTORS = {
    "short_factor": [1.0 + 0.1 * pair for pair in range(12)],
    "long_factor": [1.0 + pair for pair in range(12)],
}
MROPE = {"rope_theta": 500.0, "mrope_section": [8, 4, 4]}
SHAPES: dict[str, dict[str, Any]] = {
    "llama2": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64, "hidden_size": 96},
    "llama-biased": {"num_attention_heads": 2, "num_key_value_heads": 2, **WHOLE_VECTORS},
    "mistral-window": {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 32},
    "qwen2": {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 1040},
    "qwen2-window": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 96, "hidden_size": 112},
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 128, "hidden_size": 48},
    "smollm3-window": {"num_attention_heads": 4, "num_key_value_heads": 2, **WHOLE_VECTORS},
    "ministral": WHOLE_VECTORS,
    "ministral3": {"num_attention_heads": 5, "num_key_value_heads": 1, **WHOLE_VECTORS},
    "gemma3": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64, "hidden_size": 48},
    "gemma3-alike": {**WHOLE_VECTORS, "num_key_value_heads": 1},
    "glm4": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 112},
    "glm4-plain": WHOLE_VECTORS,
    "phi3": {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 192},
    "phi3-longrope": {
        "hidden_size": 128,
        "head_dim": 32,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, **LONG_FACTORS},
    },
    "olmo2": {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 96},
    "olmo3": {"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 128},
    "seed-oss": WHOLE_VECTORS,
    "ernie": {"num_attention_heads": 8, "num_key_value_heads": 1, **WHOLE_VECTORS},
    "granite": {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 64},
    "exaone4": {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128},
    "helium": {"hidden_size": 128, "head_dim": 32},
    "gemma1": {"num_attention_heads": 6, "num_key_value_heads": 1, **WHOLE_VECTORS},
    "cwm": {"num_attention_heads": 4, "num_key_value_heads": 1, **WHOLE_VECTORS},
    "hyperclovax": {"hidden_size": 128},
    "hunyuan": {"num_attention_heads": 3, "num_key_value_heads": 1, **WHOLE_VECTORS},
    "qwen2.5-vl": {**WHOLE_VECTORS, "hidden_size": 128, "rope_parameters": {**MROPE, "rope_type": "mrope"}},
    "qwen3-vl": {**WHOLE_VECTORS, "rope_parameters": MROPE},
    # without a layer of experts, as Llama Guard 4
    "llama4": {**WHOLE_VECTORS, "interleave_moe_layer_step": 9, "intermediate_size_mlp": 48},
    "llama4-dense": {**WHOLE_VECTORS, "interleave_moe_layer_step": 9, "intermediate_size_mlp": 48},
}
# Some with rows whose logits nobody wants, and contexts that end at, before and behind the edges of blocks.
MANY = [(1, length) for length in range(1, 40)]
BATCHES = [[(1, 1)], [(1, 16)], [(1, 17), (1, 64), (1, 2000)], [(2, 33), (1, 1), (3, 3)], MANY]


@pytest.fixture(scope="module", params=SHAPES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyFamily:
    """Each family in a shape of its own."""
    sizes = {"intermediate_size": 64, **SHAPES[request.param], "max_position_embeddings": 2048}
    return make_family(request.param, tmp_path_factory.mktemp(request.param), **sizes)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every instruction set that this machine has."""
    monkeypatch.setenv(CHOICE, request.param)
    return str(request.param)


def decoder_of(tiny: TinyFamily, dtype: torch.dtype) -> Decoder:
    return Decoder(tiny.config, tiny.weights, dtype, torch.device("cpu"))


def halved(tiny: TinyFamily, dtype: torch.dtype, is_resident: bool) -> Decoder:
    """With weights in bfloat16, as checkpoints have them."""
    weights = {name: weight.bfloat16() for name, weight in tiny.weights.items()}
    return Decoder(tiny.config, weights, dtype, torch.device("cpu"), is_resident)


def run(
    model: Decoder,
    pool: Tensor,
    sequences: list[tuple[int, int]],
    block_tokens: int,
    decodes: tuple[bool, ...] = (),
    capture: Capture | None = None,
) -> Tensor:
    """Hidden states of sequences with so many rows at the end of so many tokens; pages shuffled, but always alike."""
    config, shuffled = model.config, random.Random(7)
    pages = list(range(1, len(pool)))
    shuffled.shuffle(pages)
    groups = range(len(kv_groups(config).spans))
    tables = [[[pages.pop() for _ in range(-(-length // block_tokens))] for _, length in sequences] for _ in groups]
    positions = [at for count, length in sequences for at in range(length - count, length)]
    places = [(index, at) for index, (count, length) in enumerate(sequences) for at in range(length - count, length)]
    # as graphs have them: the leading columns of more
    slots = torch.zeros(len(tables), len(places) + 3, dtype=torch.int64)[:, : len(places)]
    for row, table in zip(slots, tables, strict=True):
        row[:] = torch.tensor([table[i][at // block_tokens] * block_tokens + at % block_tokens for i, at in places])
    starts = list(accumulate((count for count, _ in sequences), initial=0))
    lens = [length for _, length in sequences]
    caches = paged_pool(config, pool, block_tokens)
    batches = [PagedBatch(caches, config.num_heads, starts, lens, table, decodes) for table in tables]
    ids = torch.tensor([shuffled.randrange(config.vocab_size) for _ in positions])
    wanted = torch.tensor([end - 1 for end in starts[1:]])
    with torch.inference_mode():
        return model.hidden(TokenBatch(ids, torch.tensor(positions), slots, wanted), batches, capture)


def pool_of(model: Decoder, sequences: list[tuple[int, int]], block_tokens: int) -> Tensor:
    """Random keys and values, and one block of NaN that belongs to nobody."""
    config, groups = model.config, kv_groups(model.config)
    count = sum(-(-length // block_tokens) for _, length in sequences) * len(groups.spans)
    pages = torch.randn(count + 1, block_bytes(config, "float32", block_tokens) // 4)
    pages[0] = NAN
    return pages.to(model.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("isa")
def test_all_layers_at_once_are_the_layers_one_by_one(tiny: TinyFamily, dtype: torch.dtype) -> None:
    model = decoder_of(tiny, dtype)
    at_once = model.dense
    assert at_once is not None, "a dense family is left to the layers"
    for block_tokens, sequences in zip((16, 16, 16, 8, 4), BATCHES, strict=True):
        found, pools = [], []
        start = pool_of(model, sequences, block_tokens)
        for dense in (None, at_once):
            model.dense, pool = dense, start.clone()
            found.append(run(model, pool, sequences, block_tokens))
            pools.append(pool.nan_to_num())
        assert torch.equal(*found)
        assert torch.equal(*pools)
        assert not torch.equal(pools[0], start.nan_to_num()), "no keys were written"
        assert found[0].isfinite().all()


def test_capture_is_the_same_at_once_and_by_layers(tiny: TinyFamily) -> None:
    """In bfloat16, where every sum is rounded, and with several threads, which copy the rows."""
    dtype = torch.bfloat16
    model, sequences, before = decoder_of(tiny, dtype), BATCHES[3], torch.get_num_threads()
    boundaries = (model.config.num_layers, 0, FINAL, 1, 2)
    start, shape = pool_of(model, sequences, 8), (6, len(boundaries), model.config.hidden_size)
    captured, hidden = [torch.full(shape, NAN, dtype=dtype) for _ in range(2)], []
    try:
        torch.set_num_threads(3)
        for out in captured:
            hidden.append(run(model, start.clone(), sequences, 8, capture=Capture(boundaries, out)))
            plain = run(model, start.clone(), sequences, 8)
            assert torch.equal(hidden[-1], plain)
            model.dense = None
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*captured)
    assert torch.equal(*hidden)
    assert torch.equal(captured[0][[1, 2, 5], 2], hidden[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("isa")
def test_weights_in_12_bits_give_what_plain_ones_give(tiny: TinyFamily, dtype: torch.dtype) -> None:
    models = [halved(tiny, dtype, is_resident) for is_resident in (False, True)]
    layer = models[1].layers[0].as_dense()
    assert layer is not None
    # Intel's matrix unit has no product for them, and narrow panels are not made of whole units
    is_packed = {isinstance(each.data, Packed12) for each in layer.linears} == {True}
    for block_tokens, sequences in zip((16, 16, 16, 8, 4), BATCHES, strict=True):
        start = pool_of(models[0], sequences, block_tokens)
        found = []
        for model, is_at_once in ((models[0], True), (models[1], True), (models[1], False)):
            at_once, model.dense = model.dense, model.dense if is_at_once else None
            assert not (is_at_once and is_packed) or model.dense is not None
            found.append(run(model, start.clone(), sequences, block_tokens))
            model.dense = at_once
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
    assert is_packed or "amx" in str(layer.linears[0].library)


def test_two_threads_give_what_one_gives(tiny: TinyFamily) -> None:
    model, sequences = decoder_of(tiny, torch.bfloat16), BATCHES[3]
    start, before, found = pool_of(model, sequences, 16), torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            found.append(run(model, start.clone(), sequences, 16))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def refuse(*_: object) -> None:
    raise AssertionError("a layer was run by itself")


def test_engine_generates_without_single_layers(tiny: TinyFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [5]  # a single row is no chunk, at any ratio of heads
    monkeypatch.setattr(DecoderLayer, "forward", refuse)
    with Driver(tiny) as driver:
        tokens = driver.generate(prompt, 20).tokens
    assert tiny.is_greedy(prompt, tokens)


def test_long_prompts_are_read_as_chunks(tiny: TinyFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that fill the products of attention by themselves take the ordinary way."""
    model, sequences = decoder_of(tiny, torch.float32), [(64, 64)]
    monkeypatch.setattr(DecoderLayer, "forward", refuse)
    with pytest.raises(AssertionError, match="by itself"):
        run(model, pool_of(model, sequences, 16), sequences, 16)


def test_many_decoding_rows_run_in_one_call(tiny: TinyFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sequences = decoder_of(tiny, torch.float32), [(16, 40), (1, 9), (16, 16)]
    start = pool_of(model, sequences, 16)
    model.dense, at_once = None, model.dense
    expected = run(model, start.clone(), sequences, 16, (True,) * 3)
    model.dense = at_once
    monkeypatch.setattr(DecoderLayer, "forward", refuse)
    assert torch.equal(run(model, start.clone(), sequences, 16, (True,) * 3), expected)


def is_known(config: ModelConfig) -> bool:
    """All dense families but those with LayerNorm or an MLP without a gate."""
    is_dense = config.experts is None and config.latent is None
    return is_dense and config.is_gated and not config.norms.is_centered


@pytest.mark.parametrize("name", FAMILIES)
def test_every_dense_family_has_a_shape_here(name: str, family_of: Callable[[str], TinyFamily]) -> None:
    config, shaped = family_of(name).config, {FAMILIES[each][0] for each in SHAPES}
    assert not is_known(config) or FAMILIES[name][0] in shaped


@pytest.mark.parametrize("name", FAMILIES)
def test_only_what_the_kernel_knows_is_done_at_once(
    name: str, family_of: Callable[[str], TinyFamily], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, width = family_of(name).config, 16
    sizes = config.hidden_size, config.intermediate_size, config.head_dim // 2
    expected = is_known(config) and not any(size % width for size in sizes)
    monkeypatch.setenv(CHOICE, ISAS[-1])
    if ISAS[-1] != "avx2":
        assert (decoder_of(family_of(name), torch.float32).dense is not None) == expected
    monkeypatch.setenv(CHOICE, "torch")
    assert decoder_of(family_of(name), torch.float32).dense is None


def test_matrices_of_several_types_are_left_to_the_layers(family_of: Callable[[str], TinyFamily]) -> None:
    tiny = family_of("llama2")
    name = "model.layers.1.mlp.down_proj.weight"
    weights = {**tiny.weights, name: tiny.weights[name].bfloat16()}
    assert Decoder(tiny.config, weights, torch.float32, torch.device("cpu")).dense is None


def test_bfloat16_weights_of_a_float32_model_stay_what_they_are(tiny: TinyFamily) -> None:
    halves = {name: each.bfloat16() for name, each in tiny.weights.items()}
    wide = {name: each.float() for name, each in halves.items()}
    states = []
    for weights in (halves, wide):
        model = Decoder(tiny.config, weights, torch.float32, torch.device("cpu"))
        torch.manual_seed(3)
        assert model.dense is not None
        states.append(run(model, pool_of(model, BATCHES[3], 8), BATCHES[3], 8))
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-5)
