"""Answers that the target generates for the draft head, and how accepted drafts are counted in them."""

import random
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from training.weft_nano.corpus import Encoder
from training.weft_nano.entities import Source
from training.weft_nano_draft.answers import Target, draw_examples, read_shard, write_shard
from training.weft_nano_draft.head import read_head
from training.weft_nano_draft.target import load_target
from training.weft_nano_draft.unroll import DraftStep
from training.weft_nano_draft.walk import Accepted, answer_spans, count_matches, measure, walk
from transformers import PreTrainedTokenizerFast


def test_answers_keep_the_prompts_and_end(checkpoint: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    encoder = Encoder(tokenizer)
    drawn = list(islice(draw_examples(encoder, Source(random.Random(3)), 150), 2))
    target = Target(checkpoint, 2)
    dialogues = list(target.answer(iter(drawn)))
    target.stop()
    prompts = [example.token_ids[: example.spans[0][0]] for example, _ in drawn]
    for dialogue in dialogues:
        spans = answer_spans(dialogue.is_answer.tolist())
        assert dialogue.token_ids[: spans[0][0]].tolist() in prompts
        assert all(dialogue.token_ids[end - 1] == encoder.eos_id for _, end in spans)
    write_shard(tmp_path / "000.npz", dialogues)
    for read, written in zip(read_shard(tmp_path / "000.npz"), dialogues, strict=True):
        assert np.array_equal(read.token_ids, written.token_ids)
        assert np.array_equal(read.is_answer, written.is_answer)


def test_matches_stop_at_the_first_wrong_draft() -> None:
    token_ids = torch.tensor([[3, 4, 5, 6, 7]])
    steps = []
    for number, drafts in enumerate([[5, 0], [6, 7], [7, 0]]):
        rows = torch.arange(2)
        logits = torch.nn.functional.one_hot(torch.tensor(drafts), 8).float()
        steps.append(DraftStep(logits[: 2 - number // 2], rows[: 2 - number // 2] * 0, rows[: 2 - number // 2]))
    accepted = Accepted()
    assert count_matches(steps, token_ids, accepted).tolist() == [[3, 0, 0, 0, 0]]
    assert accepted.top1()[:3] == [0.5, 1.0, 1.0]


def test_walk_counts_steps_of_accepted_drafts() -> None:
    # Tokens 2 to 7 are the answer. Row 1 follows token 2.
    matches = [0, 3, 9, 9, 0, 0, 9, 9]
    assert walk(matches, 2, 8, drafts=1) == 3
    assert walk(matches, 2, 8, drafts=3) == 2
    assert walk([0] * 8, 2, 8, drafts=3) == 5


def test_shipped_head_is_small_and_bf16(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "draft" / "model.safetensors")
    assert all(each.dtype == torch.bfloat16 and each.isfinite().all() for each in weights.values())
    assert sum(each.numel() for each in weights.values()) < 1_100_000
    assert not any("embed_tokens" in name or "lm_head" in name for name in weights)


def test_shipped_head_gains_three_tokens_a_step(checkpoint: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    encoder, source = Encoder(tokenizer), Source(random.Random("shipped head"), held_out=True)
    target = Target(checkpoint, 8)
    dialogues = list(target.answer(islice(draw_examples(encoder, source, 300), 8)))
    target.stop()
    accepted = measure(read_head(checkpoint / "draft"), load_target(checkpoint), dialogues)
    assert accepted.tokens[3] > 150
    assert accepted.tokens_per_step()[3] >= 3.0
