"""Whole models on the kernels that a GPU would run, interpreted where there is none: the logits are still those of
transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.device import DEVICE
from tests.weft.engine.harness import Driver
from tests.weft.model import test_families
from tests.weft.model.test_quantized import FP8, INT4, quantized
from tests.weft.tiny_families import make_family
from weft.model import attention, decoder, latent, loading
from weft.model.config import ModelConfig
from weft.model.step import TokenBatch
from weft_kernels import packed
from weft_kernels.moe import PackedExperts
from weft_kernels.packed import F12, Fp8, Int4, Stored, pack_f12, stack
from weft_kernels.paged_attention import FULL, KeySpan, PagedBatch

pytest.importorskip("triton")

from weft_kernels.latent_kv.kernel import latent_kv_kernel
from weft_kernels.paged_attention.kernel import paged_attention_kernels
from weft_kernels.rms_norm.kernel import add_rms_norm_kernel, rms_norm_kernel
from weft_kernels.rope_kv.kernel import rope_kv_kernel
from weft_kernels.silu_mul.kernel import silu_mul_kernel

NUM_TOKENS = 18
# two layers of each, which have every kind that the family has
FEW_LAYERS: dict[str, dict[str, Any]] = {
    "mistral-window": {"num_hidden_layers": 2},
    "qwen3-moe": {"num_hidden_layers": 2},
    "llama4": {"num_hidden_layers": 2, "no_rope_layers": [1, 0], "interleave_moe_layer_step": 2},
    "deepseek": {"num_hidden_layers": 2},
    "gpt-oss": {"num_hidden_layers": 2},
}


def paged_attention(
    q: Tensor,
    layer: int,
    batch: PagedBatch,
    span: KeySpan = FULL,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return paged_attention_kernels(q, layer, batch, span, scale, sinks=sinks)


def latent_attention(q: Tensor, layer: int, batch: PagedBatch, value_dim: int, scale: float) -> Tensor:
    return paged_attention_kernels(q, layer, batch, FULL, scale, value_dim)


def pack_experts(pairs: Iterable[tuple[Tensor, Tensor]], dtype: torch.dtype, is_resident: bool) -> PackedExperts:
    assert not is_resident
    gate_up, down = zip(*pairs, strict=True)
    return PackedExperts((), (), (torch.stack(gate_up).to(dtype), torch.stack(down).to(dtype)))


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of what the models import."""
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (attention, "paged_attention", paged_attention),
        (attention, "rope_kv", rope_kv_kernel),
        (attention, "rms_norm", rms_norm_kernel),
        (decoder, "add_rms_norm", add_rms_norm_kernel),
        (latent, "latent_attention", latent_attention),
        (latent, "latent_kv", latent_kv_kernel),
        (latent, "paged_attention", paged_attention),
        (latent, "rms_norm", rms_norm_kernel),
        (decoder, "silu_mul", silu_mul_kernel),
        (decoder, "pack_experts", pack_experts),
    ]
    for module, name, kernel in replaced:
        monkeypatch.setattr(module, name, kernel)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", FEW_LAYERS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_families, "NUM_TOKENS", NUM_TOKENS)
    tiny = make_family(name, tmp_path, **FEW_LAYERS[name])
    expected = tiny.logits(test_families.TOKENS[:NUM_TOKENS])
    # 8 rows at a time go to the decode kernel, 18 to the one for prefill
    for chunk in (8, NUM_TOKENS):
        logits = test_families.logits_in_chunks(tiny, chunk, device=DEVICE)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


@pytest.mark.usefixtures("_kernels")
def test_logits_on_resident_weights_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On F12 words from the embedding to the head, with every matrix packed whether that suits it or not."""
    tiny = make_family("llama3", tmp_path, num_hidden_layers=1)
    for parameter in tiny.oracle.parameters():
        parameter.data = parameter.data.bfloat16().float()
    tiny.oracle.save_pretrained(tmp_path)

    def resident_decoder(
        config: ModelConfig, weights: dict[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> decoder.Decoder:
        halves = {name: weight.bfloat16() if weight.ndim > 1 else weight for name, weight in weights.items()}
        model = decoder.Decoder(config, halves, dtype, device, is_resident=True)
        assert isinstance(model.embedding, F12)
        assert isinstance(model.head.data, F12)
        assert isinstance(model.layers[0].attention.output.data, F12)
        layer = model.layers[0].as_dense()
        assert layer is not None
        linears = (layer.qkv, layer.output, layer.gate_up, layer.down, model.head)
        assert {each.shape for each in model.packed} == {(each.num_outputs, each.num_inputs) for each in linears}
        return model

    for module in (loading, packed):
        # the model's dtype is float32, its weights are bfloat16's
        monkeypatch.setattr(module, "as_f12", lambda weight: pack_f12(weight.bfloat16()))
    monkeypatch.setattr(test_families, "Decoder", resident_decoder)
    monkeypatch.setattr(decoder.Decoder, "forward", forward_silently_too(decoder.Decoder.forward))
    monkeypatch.setattr(test_families, "NUM_TOKENS", 3)
    expected = tiny.logits(test_families.TOKENS[:3])
    logits = test_families.logits_in_chunks(tiny, 2, device=DEVICE)  # and one row alone, which has its own kernel
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


def forward_silently_too(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The first chunk without logits as well, as one in the midst of its prompt."""

    def call(model: decoder.Decoder, rows: TokenBatch, batches: Sequence[PagedBatch]) -> Tensor:
        if not rows.positions[0]:
            logits = forward(model, replace(rows, logit_rows=rows.logit_rows[:0]), batches)
            assert logits.shape == (0, model.config.vocab_size)
        return forward(model, rows, batches)

    return call


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(("name", "fields"), [("deepseek", FP8), ("kimi-k2", INT4)])
def test_logits_on_weights_that_stay_quantized_are_those_of_transformers(
    name: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is unpacked but in the product, and what latent attention takes apart."""
    (tmp_path / "plain").mkdir()
    tiny = quantized(make_family(name, tmp_path / "plain"), fields, tmp_path / "packed")
    kept: list[type] = []

    def held(weight: Stored, dtype: torch.dtype, is_resident: bool) -> Stored:
        kept.append(type(weight))
        return weight

    monkeypatch.setattr(loading, "on_device", held)
    monkeypatch.setattr(decoder, "pack_experts", stack_experts)
    monkeypatch.setattr(test_families, "NUM_TOKENS", 3)
    logits = test_families.logits_in_chunks(tiny, 3, device=DEVICE)
    expected = tiny.logits(test_families.TOKENS[:3])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
    assert kept.count(Fp8) > 10 if fields is FP8 else Int4 not in kept  # Kimi's experts alone are INT4


def stack_experts(pairs: Iterable[tuple[Stored, Stored]], dtype: torch.dtype, is_resident: bool) -> PackedExperts:
    """As on a GPU."""
    gate_up, down = (stack(each) for each in zip(*pairs, strict=True))
    assert isinstance(gate_up, Fp8 | Int4)
    assert isinstance(down, Fp8 | Int4)
    return PackedExperts((), (), (gate_up, down))


@pytest.mark.usefixtures("_kernels")
def test_kernels_read_a_decode_steps_buffers_where_they_stay(tmp_path: Path) -> None:
    """Padded steps of one size after another: lengths and tables reach the kernels through the same memory."""
    tiny = make_family("llama4", tmp_path, **FEW_LAYERS["llama4"])
    prompts = [[5, 9, 11, 4, 8, 3, 17, 6, 12, 7, 10], [8, 4, 6], [9]]
    limits: dict[str, Any] = {"block_tokens": 4, "chunk_tokens": 16, "max_num_seqs": 4}
    with Driver(tiny, device=DEVICE, decode_graphs=True, **limits) as driver:
        keys = [driver.submit(str(i), prompt, 5 - i) for i, prompt in enumerate(prompts)]
        found = [driver.wait_end(key).tokens for key in keys]
    assert found == [tiny.greedy(prompt, 5 - i) for i, prompt in enumerate(prompts)]
