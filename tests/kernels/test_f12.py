"""F12 gives back every bit of whatever was packed, and takes three quarters of the room for what models are made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from loadtest.weights.synthetic import KINDS, tensor
from safetensors.torch import load_file
from torch import Tensor

from weft_kernels import packed
from weft_kernels.packed import F12, as_f12, embedding_rows, pack_f12
from weft_kernels.packed.f12 import BLOCK_ROWS

NANO = Path(__file__).parents[2] / "models/weft-nano/model.safetensors"
ALL = np.arange(1 << 16, dtype=np.uint16)
NAN_PAYLOADS = [0x7F81, 0x7FC0, 0xFFFF, 0x7FAB]


def from_bits(words: np.ndarray) -> Tensor:
    return torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("shape", [(256, 256), (1, 65536), (8192, 8), (65, 1000), (1024, 64)])
def test_all_patterns_come_back_bit_for_bit(shape: tuple[int, int]) -> None:
    weight = from_bits(ALL[: shape[0] * shape[1]].reshape(shape).copy())
    assert_same_bits(pack_f12(weight).unpack(), weight)


@pytest.mark.parametrize("order", ["shuffled", "by exponent"])
def test_all_patterns_come_back_wherever_they_stand(order: str) -> None:
    bits = np.random.default_rng(3).permutation(ALL) if order == "shuffled" else ALL[np.argsort((ALL >> 7) & 255)]
    weight = from_bits(bits.reshape(512, 128).copy())
    assert_same_bits(pack_f12(weight).unpack(), weight)


@given(arrays.arrays(np.uint16, st.tuples(st.integers(0, 80), st.integers(0, 40))))
def test_any_matrix_comes_back(bits: np.ndarray) -> None:
    weight = from_bits(bits)
    assert_same_bits(pack_f12(weight).unpack(), weight)


@pytest.mark.parametrize("bits", [0x0000, 0x8000, 0x0001, 0x807F, 0x3F80, 0x7F7F, 0x7F80, *NAN_PAYLOADS])
def test_constants_come_back_and_only_ordinary_ones_are_worth_it(bits: int) -> None:
    weight = from_bits(np.full((70, 72), bits, np.uint16))
    found = pack_f12(weight)
    assert_same_bits(found.unpack(), weight)
    # zeros and ordinary numbers have codes; denormals, the largest exponents, infinities and NaN have none
    assert found.suits == (bits in (0x0000, 0x8000, 0x3F80))
    assert (len(found.values) == 0) == found.suits


def test_chunks_that_are_packed_one_by_one_make_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(300, 40).bfloat16()
    weight[[0, 63, 64, 299], [0, 39, 1, 7]] = float("nan")
    whole = pack_f12(weight)
    monkeypatch.setattr(packed.f12, "CHUNK_WEIGHTS", 1)
    for part, expected in zip(pack_f12(weight).tensors, whole.tensors, strict=True):
        assert torch.equal(part.nan_to_num(9), expected.nan_to_num(9))


def test_words_hold_what_the_definition_says() -> None:
    """Eight weights of one exponent: signs and mantissas by hand."""
    mantissas = np.array([1, 2, 3, 4, 5, 6, 0x55, 0x2A], np.uint16)
    signs = np.array([0, 1, 1, 0, 0, 0, 1, 0], np.uint16)
    found = pack_f12(from_bits((signs << 15 | 125 << 7 | mantissas)[None]))
    code = 125 - int(found.bases[0])
    assert 1 <= code <= 15
    halves = [int(sign) << 15 | code << 7 | int(mantissa) for sign, mantissa in zip(signs, mantissas, strict=True)]
    words = [int(word) & 0xFFFFFFFF for word in found.words.flatten()]
    in_place = [low | high << 16 for low, high in zip(halves[:6:2], halves[1:6:2], strict=True)]
    assert [word & 0x87FF87FF for word in words] == in_place
    fourth = halves[6] | halves[7] << 16
    assert (words[0] >> 11) & 0x000F000F == fourth & 0x000F000F
    assert (words[1] >> 7) & 0x00F000F0 == fourth & 0x00F000F0
    assert (words[2] >> 3) & 0x07000700 | (words[2] << 1) & 0x80008000 == fourth & 0x87FF87FF & ~0x00FF00FF


@pytest.mark.parametrize("kind", KINDS)
def test_published_statistics_take_three_quarters(kind: str) -> None:
    weight = from_bits(tensor(kind, 512, 1024))
    found = pack_f12(weight)
    assert found.suits
    assert found.nbytes <= 0.755 * weight.nbytes
    assert_same_bits(found.unpack(), weight)


def test_the_shipped_model_takes_three_quarters_with_its_embedding_and_norms() -> None:
    weights = load_file(NANO)
    held = 0
    for weight in weights.values():
        found = pack_f12(weight) if weight.ndim == 2 else None
        held += found.nbytes if found is not None and found.suits else weight.nbytes
    assert held <= 0.755 * sum(weight.nbytes for weight in weights.values())


def test_what_f12_does_not_suit_stays_as_it_came() -> None:
    wide = (torch.randn(64, 512) * torch.logspace(-20, 20, 512)).bfloat16()
    assert not pack_f12(wide).suits
    assert as_f12(wide) is wide
    crowded = torch.randn(20 * BLOCK_ROWS, 512).bfloat16()
    crowded[:BLOCK_ROWS, :40] = float("inf")
    found = pack_f12(crowded)
    assert found.nbytes < 0.77 * crowded.nbytes
    assert not found.suits, "one program would have to go through all escapes"
    plain = torch.randn(64, 64)
    assert as_f12(plain) is plain


def test_a_cpu_has_a_form_of_its_own_and_keeps_its_tables_plain() -> None:
    weight = torch.randn(64, 64).bfloat16()
    assert as_f12(weight) is weight
    ids = torch.tensor([3, 0, 63, 3])
    assert_same_bits(embedding_rows(weight, ids), weight[ids])


@pytest.mark.gpu
def test_a_gpu_packs_the_same_words() -> None:
    weight = torch.randn(300, 520).bfloat16()
    weight[7, 100] = float("-inf")
    there = as_f12(weight.cuda())
    assert isinstance(there, F12)
    for part, expected in zip(there.tensors, pack_f12(weight).tensors, strict=True):
        assert torch.equal(part.cpu(), expected)
