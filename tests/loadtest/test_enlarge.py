"""An enlarged checkpoint computes the logits of the small one, bit for bit."""

from __future__ import annotations

import json
import queue
from pathlib import Path

import pytest
import torch
from loadtest.models import NANO
from loadtest.speculation.enlarge import FACTOR, enlarge_checkpoint
from safetensors.torch import load_file, save_file
from training.weft_nano_draft.head import DraftHead, HeadShape, read_head, write_head
from training.weft_nano_draft.unroll import draftable, unroll
from transformers import LlamaConfig

from weft.engine.config import EngineConfig
from weft.engine.messages import SequenceMode, SequenceSpec, StepOutput
from weft.engine.runner import build_engine
from weft.model.config import read_config
from weft.model.kv_layout import kv_groups
from weft.request import PositionLogprobs, RequestKey, SamplingParams

PROMPT = tuple((37 * i * i + 11 * i + 5) % 2000 + 8 for i in range(50))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two layers of weft-nano."""
    folder = tmp_path_factory.mktemp("small")
    config = json.loads((NANO / "config.json").read_text()) | {"num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(NANO / "model.safetensors")
    dropped = tuple(f"model.layers.{index}." for index in range(2, 6))
    kept = {name: weight for name, weight in weights.items() if not name.startswith(dropped)}
    save_file(kept, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def large(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    enlarge_checkpoint(small, folder, 3)
    return folder


class PromptLogits:
    """Keeps the logits of all prompt positions."""

    def __init__(self) -> None:
        self.chunks: list[torch.Tensor] = []

    def observe(self, start: int, hidden: torch.Tensor, logits: object) -> None:
        assert callable(logits)
        self.chunks.append(logits(hidden).clone())


def run(checkpoint: Path, dtype: str, is_resident: bool) -> tuple[torch.Tensor, list[int], list[PositionLogprobs]]:
    """Return the prompt's logits, and 8 greedy tokens with the 20 best logprobs of each."""
    config = read_config(checkpoint)
    outputs: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()
    engine = build_engine(
        config,
        load_file(checkpoint / "model.safetensors"),
        dtype=dtype,
        device="cpu",
        engine_config=EngineConfig(
            num_blocks=16,
            block_tokens=16,
            chunk_tokens=32,
            spans=kv_groups(config).spans,
            vocab_size=config.vocab_size,
            max_context_tokens=128,
        ),
        listener=outputs.put,
        is_resident=is_resident,
    )
    observer, tokens, logprobs = PromptLogits(), list[int](), list[PositionLogprobs]()
    sampling = SamplingParams(8, ignore_eos=True, num_logprobs=20)
    engine.submit(SequenceSpec(RequestKey("one"), PROMPT, sampling, SequenceMode.GENERATE, observer=observer))
    engine.start()
    is_running = True
    while is_running:
        output = outputs.get(timeout=30)
        assert not output.failures
        for delta in output.deltas:
            tokens += delta.token_ids
            logprobs += delta.logprobs
            is_running = delta.finish_reason is None
    engine.stop()
    return torch.cat(observer.chunks), tokens, logprobs


@pytest.mark.parametrize(
    ("dtype", "is_resident"), [("float32", False), ("bfloat16", False), ("bfloat16", True)], ids=["fp32", "bf16", "f12"]
)
def test_enlarged_model_keeps_every_logit(small: Path, large: Path, dtype: str, is_resident: bool) -> None:
    logits, tokens, logprobs = run(small, dtype, is_resident)
    larger_logits, larger_tokens, larger_logprobs = run(large, dtype, is_resident)
    assert logits.shape == (len(PROMPT), 2048)
    assert torch.equal(logits, larger_logits)
    assert tokens == larger_tokens
    assert logprobs == larger_logprobs


def test_enlarged_head_drafts_the_same(small: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = LlamaConfig(**json.loads((small / "config.json").read_text()))
    head = DraftHead(HeadShape.like(target, (0, 1, 2)))
    write_head(head, target, tmp_path / "head")
    enlarge_checkpoint(tmp_path / "head", tmp_path / "larger", 1)
    token_ids, embedding = torch.tensor([PROMPT]), torch.randn(2048, 256)
    features = tuple(torch.randn(1, len(PROMPT), 256) for _ in range(3))
    valid = draftable(torch.ones(1, len(PROMPT), dtype=torch.bool), 3)
    wider = [torch.nn.functional.pad(each, (0, (FACTOR - 1) * 256)) for each in (embedding, *features)]
    expected = unroll(read_head(tmp_path / "head"), embedding, token_ids, features, valid)
    found = unroll(read_head(tmp_path / "larger"), wider[0], token_ids, tuple(wider[1:]), valid)
    for one, other in zip(expected, found, strict=True):
        # torch sums longer rows in another order.
        torch.testing.assert_close(other.logits, one.logits, rtol=1e-4, atol=1e-4)
