"""Changes of logits: the sparse form is the loop that says what they mean, and the parts are those of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from weft_kernels.logit_changes import MASKED_ROWS, LogitChanges, apply_changes, change_reference, unpack_bits

ROWS, VOCAB = 4, 45


def places(data: Any) -> torch.Tensor:
    """Some (row, token) pairs, each once."""
    pairs = data.draw(st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, VOCAB - 1)), unique=True, max_size=9))
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T


@given(data=st.data(), seed=st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_the_sparse_form_means_what_the_loop_says(data: Any, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    bias, seen, banned = places(data), places(data), places(data)
    mask_rows = torch.tensor(data.draw(st.lists(st.integers(0, ROWS - 1), unique=True)), dtype=torch.int64)
    changes = LogitChanges(
        bias=(bias, torch.randn(bias.shape[1], generator=random)),
        seen=(seen, torch.randint(0, 3, (seen.shape[1],), generator=random).float()),
        penalties=torch.rand(ROWS, 3, generator=random) + 0.5,
        banned=banned,
        mask_rows=mask_rows,
        masks=torch.randint(-(2**31), 2**31, (len(mask_rows), 2), dtype=torch.int32, generator=random),
    )
    logits = torch.randn(ROWS, VOCAB, generator=random)
    before = logits.clone()
    assert torch.equal(apply_changes(logits, changes), change_reference(logits, changes))
    assert torch.equal(logits, before), "logprobs are still to be read from it"


def test_masks_of_many_rows_are_applied_piece_by_piece() -> None:
    rows = 2 * MASKED_ROWS + 3
    logits = torch.randn(rows + 2, VOCAB)
    masks = torch.randint(-(2**31), 2**31, (rows, 2), dtype=torch.int32)
    changes = LogitChanges(mask_rows=torch.randperm(rows + 2)[:rows], masks=masks)
    assert torch.equal(apply_changes(logits, changes), change_reference(logits, changes))


def test_what_a_gpu_unpacks_is_what_numpy_does() -> None:
    masks = torch.randint(-(2**31), 2**31, (5, 3), dtype=torch.int32)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as measured:
        bits = unpack_bits(masks)
    bytes_taken = sum(event.self_cpu_memory_usage for event in measured.events() if event.self_cpu_memory_usage > 0)
    assert bits.numel() <= bytes_taken < bits.numel() + 256, "a byte for each bit, and hardly anything beside them"
    expected = np.unpackbits(masks.numpy().view(np.uint8), axis=-1, bitorder="little").astype(bool)
    assert torch.equal(bits, torch.from_numpy(expected))


@pytest.mark.gpu
def test_on_a_gpu_they_are_those_of_a_cpu() -> None:
    rows, source = 2 * MASKED_ROWS + 3, torch.Generator().manual_seed(3)
    logits, (addends, counts) = torch.randn(rows, VOCAB, generator=source), torch.randn(2, rows, generator=source)
    places, banned = (torch.stack((torch.arange(rows), torch.arange(rows) * step % VOCAB)) for step in (7, 11))
    masks = torch.randint(-(2**31), 2**31, (rows, 2), dtype=torch.int32, generator=source)
    columns = torch.rand(rows, 3, generator=source) + 0.5, banned, torch.arange(rows).flip(0), masks

    def changed(device: str) -> torch.Tensor:
        there = places.to(device)
        pairs = (there, addends.to(device)), (there, counts.to(device))
        return apply_changes(logits.to(device), LogitChanges(*pairs, *(each.to(device) for each in columns))).cpu()

    torch.testing.assert_close(changed("cuda"), changed("cpu"))


def test_repetition_penalty_and_bias_are_those_of_transformers() -> None:
    logits = torch.randn(1, VOCAB)
    seen = [3, 9, 30]
    biases: Any = {(9,): 2.5, (40,): -100.0}
    expected: Any = SequenceBiasLogitsProcessor(biases)(torch.tensor([seen]), logits)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([seen]), expected)
    changes = LogitChanges(
        bias=(torch.tensor([[0, 0], [9, 40]]), torch.tensor([2.5, -100.0])),
        seen=(torch.tensor([[0] * 3, seen]), torch.zeros(3)),
        penalties=torch.tensor([[1.7, 0.0, 0.0]]),
    )
    assert torch.allclose(apply_changes(logits, changes), expected)
