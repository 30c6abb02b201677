"""Runs Weft Nano over training text and keeps what a head learns from: features and logits."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from training.weft_nano.attention import use_block_attention
from training.weft_nano_draft.batches import AnswerBatch
from training.weft_nano_draft.unroll import TargetOutput


def load_target(checkpoint: Path) -> LlamaForCausalLM:
    """Return the frozen target: its bfloat16 weights in float32."""
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.requires_grad_(False)
    use_block_attention(model)
    return model


@torch.no_grad()
def run_target(model: LlamaForCausalLM, batch: AnswerBatch, boundaries: tuple[int, ...]) -> TargetOutput:
    """Return the residual stream at each boundary, and the logits of the answers' tokens."""
    streams: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0]))
    try:
        output = model.model(input_ids=batch.token_ids, use_cache=False, output_hidden_states=True)
    finally:
        hook.remove()
    # The last of `hidden_states` is normed; the hook has caught the stream before that.
    streams = [*output.hidden_states[:-1], *streams]
    chosen = batch.is_answer.flatten().nonzero().squeeze(1)
    logits_at = torch.zeros(batch.is_answer.numel(), dtype=torch.long)
    logits_at[chosen] = torch.arange(len(chosen))
    logits = model.lm_head(output.last_hidden_state.flatten(0, 1)[chosen])
    features = tuple(streams[boundary] for boundary in boundaries)
    return TargetOutput(features, logits, logits_at.view(batch.is_answer.shape))
