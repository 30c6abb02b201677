"""The draft head's training pass draws the same distributions as drafting token by token."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from training.weft_nano_draft.head import DraftHead, HeadShape, read_head, write_head
from training.weft_nano_draft.unroll import draftable, unroll
from transformers import LlamaConfig

from weft.model.draft import DraftRows, DraftTarget
from weft.model.eagle import EagleHead
from weft.model.spec import LayerSpec, ModelConfig, Rope
from weft.weights.draft_checkpoint import read_draft_checkpoint
from weft_kernels.layer_cache import uniform_pool
from weft_kernels.linear import pack
from weft_kernels.paged_attention import PagedBatch

NUM_STEPS = 4
SHAPE = HeadShape(16, 24, 4, 2, 4, 1e-5, 100.0, (0, 1, 2))


def draft_one_by_one(
    head: DraftHead, embedding: Tensor, token_ids: Tensor, features: tuple[Tensor, ...] | Tensor, start: int
) -> Tensor:
    """Return the logits of each draft step after position `start`, from a key list that grows token by token."""
    keys: list[Tensor] = []
    values: list[Tensor] = []
    logits = []
    recycled: Tensor | None = None
    for row in range(start + NUM_STEPS):
        is_true = row <= start
        state = head.fuse(tuple(each[row : row + 1] for each in features)) if is_true else recycled
        assert state is not None
        entered = head.enter(state, embedding[token_ids[row + 1]][None])
        position = torch.tensor([row])
        key, value = head.key_value(entered, position)
        keys.append(key[0].repeat_interleave(2, 0))
        values.append(value[0].repeat_interleave(2, 0))
        query = head.query(entered, position)[0]
        scores = torch.stack([(query * key).sum(-1) for key in keys], -1) / SHAPE.head_dim**0.5
        attended = torch.einsum("hn,nhd->hd", scores.softmax(-1), torch.stack(values)).reshape(1, -1)
        recycled = head.leave(state, attended)
        if row >= start:
            logits.append(functional.linear(recycled, embedding))
    return torch.cat(logits)


def test_unrolled_steps_equal_drafting_token_by_token() -> None:
    torch.manual_seed(0)
    head, embedding = DraftHead(SHAPE), torch.randn(32, 16)
    token_ids = torch.randint(32, (2, 14))
    features = tuple(torch.randn(2, 14, 16) for _ in SHAPE.boundaries)
    is_answer = torch.zeros(2, 14, dtype=torch.bool)
    is_answer[0, 2:9] = is_answer[0, 11:14] = is_answer[1, 4:13] = True
    steps = unroll(head, embedding, token_ids, features, draftable(is_answer, NUM_STEPS))
    one_by_one = {
        (dialogue, start): draft_one_by_one(
            head, embedding, token_ids[dialogue], torch.stack([each[dialogue] for each in features]), start
        )
        for dialogue in range(2)
        for start in range(14 - NUM_STEPS - 1)
    }
    compared = 0
    for number, step in enumerate(steps):
        for logits, dialogue, start in zip(step.logits, step.dialogue.tolist(), step.position.tolist(), strict=True):
            if (dialogue, start) in one_by_one:
                torch.testing.assert_close(logits, one_by_one[dialogue, start][number], rtol=1e-5, atol=1e-5)
                compared += 1
    assert compared > 30


def test_drafts_never_leave_an_answer() -> None:
    is_answer = torch.tensor([[0, 1, 1, 1, 0, 1, 1]], dtype=torch.bool)
    first, second = draftable(is_answer, 2)
    # Row k holds token k + 1 and predicts token k + 2.
    assert first.tolist() == [[True, True, False, False, True, False, False]]
    assert second.tolist() == [[True, False, False, False, False, False, False]]


TARGET = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    layers=(LayerSpec(),) * 6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope=Rope(100.0),
    max_positions=64,
    is_tied=True,
    eos_token_ids=(),
    dtype="float32",
)


@pytest.mark.parametrize("boundaries", [(0, 2, 6), (1, 3, 5)])
def test_engine_drafts_as_the_trainer_does(boundaries: tuple[int, ...], tmp_path: Path) -> None:
    """Two rows of features and three drafts, from the files that the trainer writes."""
    torch.manual_seed(2)
    embedding, token_ids = torch.randn(32, 16).bfloat16().float(), torch.randint(32, (NUM_STEPS + 2,))
    features = torch.randn(NUM_STEPS + 1, 3, 16)
    write_head(
        DraftHead(replace(SHAPE, boundaries=boundaries)),
        LlamaConfig(vocab_size=32, hidden_size=16, num_attention_heads=4),
        tmp_path,
    )
    trained = read_head(tmp_path)
    draft = read_draft_checkpoint(tmp_path, TARGET).config
    assert trained.shape.boundaries == draft.boundaries == boundaries
    target = DraftTarget(embedding, pack(embedding, torch.float32), torch.float32, torch.device("cpu"))
    engine = EagleHead(draft, load_file(tmp_path / "model.safetensors"), target)
    pool, found = uniform_pool(torch.zeros(1, 2, 1, 2, 8, 4)), []
    with torch.inference_mode():
        expected = draft_one_by_one(trained, embedding, token_ids, features.unbind(1), start=1)
        state = engine.fuse(features[:2])
        for step in range(NUM_STEPS):
            places = torch.arange(2) if step == 0 else torch.tensor([step + 1])
            batch = PagedBatch(pool, 4, [0, len(places)], [step + 2], [[0]])
            state = engine.forward(state, DraftRows(token_ids[places + 1], places + 1, places[None]), [batch])[-1:]
            found.append(engine.logits(state))
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-4)
