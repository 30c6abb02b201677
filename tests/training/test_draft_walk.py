"""Answers that the target generates for the draft head, and how accepted drafts are counted in them."""

import random
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from training.weft_nano.corpus import Encoder
from training.weft_nano.entities import Source
from training.weft_nano_draft.answers import Target, draw_examples, read_shard, write_shard
from training.weft_nano_draft.unroll import DraftStep
from training.weft_nano_draft.walk import Accepted, answer_spans, count_matches, walk
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
