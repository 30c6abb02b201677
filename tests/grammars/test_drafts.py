"""The real speculator on weft-nano: with drafts of every source, texts are those without drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.grammars.test_twins import SCHEMA
from tests.weft.engine.harness import Driver
from weft.engine.drafting.drafter import DecodeStep, DraftHead, DraftRequest, DraftSource, Proposal
from weft.engine.drafting.speculator import AdaptiveSpeculator
from weft.grammar import load_grammars
from weft.model.config import read_config
from weft.request import FinishReason, Speculation
from weft_services.gateway.grammar.answer_grammar import join_parts, schema_part

NANO = Path(__file__).parents[2] / "models" / "weft-nano"
TEXT = "The sky is blue because air scatters blue light more than red light."
OPENING = "<|im_start|>assistant\n"
ASKED = {
    "copy": f"<|im_start|>user\n{TEXT} {TEXT} {TEXT} {TEXT[:40]}",
    "json": "<|im_start|>user\nGive me some JSON.",
    "prediction": "<|im_start|>user\nHello!",
}
NUM_TOKENS = 60
SHORT = {**SCHEMA, "properties": {**SCHEMA["properties"], "city": {"type": "string", "maxLength": 8}}}
GRAMMAR = join_parts([schema_part(SHORT, "answer", "schema")])
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 3}}
SETTINGS: dict[str, Any] = {"num_blocks": 400, "dtype": "float32", "max_drafts": 15}


class EvenSteps:
    """Passes on all steps as equally long, so that the drafts do not depend on the machine."""

    def __init__(self, speculator: AdaptiveSpeculator) -> None:
        self._speculator = speculator

    def set_head(self, head: DraftHead) -> None:
        self._speculator.set_head(head)

    def fills_draft_layer(self, sequence: Any) -> bool:
        return self._speculator.fills_draft_layer(sequence)

    def propose(self, requests: Sequence[DraftRequest], num_prompt_rows: int) -> list[Proposal]:
        return self._speculator.propose(requests, num_prompt_rows)

    def on_step(self, step: DecodeStep) -> None:
        self._speculator.on_step(replace(step, seconds=0.01))

    def forget(self, sequence: Any) -> None:
        self._speculator.forget(sequence)


@pytest.fixture(scope="module")
def nano() -> Any:
    return SimpleNamespace(config=read_config(NANO), weights=load_file(NANO / "model.safetensors"))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_of_all_sources_change_no_text(nano: Any, sampling: str) -> None:
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    grammars = load_grammars(NANO, nano.config.vocab_size, nano.config.eos_token_ids)
    prompts = {name: tokenizer.encode(f"{ASKED[name]}<|im_end|>\n{OPENING}").ids for name in ASKED}
    heard: dict[bool, list[Any]] = {}
    prediction: tuple[int, ...] = ()
    for drafts in (False, True):
        speculator = AdaptiveSpeculator(nano.config.eos_token_ids, clock=lambda: 0.0)
        with Driver(nano, **SETTINGS, speculator=EvenSteps(speculator) if drafts else None) as driver:
            keys = []
            for name, prompt in prompts.items():
                options = SAMPLINGS[sampling] | {"speculation": Speculation(prediction=prediction)}
                if name == "json":
                    options |= {"constraint": grammars.compile(GRAMMAR, with_twins=True), "ignore_eos": False}
                keys.append(driver.submit(name, prompt, NUM_TOKENS, **options))
            heard[drafts] = [driver.wait_end(key) for key in keys]
            driver.assert_all_blocks_are_back()
        prediction = tuple(heard[False][2].tokens[:20] + heard[False][2].tokens[25:])
    assert [each.tokens for each in heard[True]] == [each.tokens for each in heard[False]]
    assert [each.reason for each in heard[True]] == [each.reason for each in heard[False]]
    if heard[True][1].reason is FinishReason.STOP:  # numbers may be long
        jsonschema.validate(json.loads(tokenizer.decode(heard[True][1].tokens)), SHORT)
    accepted = {source: sum(counts.accepted) for source, counts in speculator.stats().sources.items()}
    assert set(accepted) == {DraftSource.GRAMMAR, DraftSource.PREDICTION, DraftSource.COPY}
    assert min(accepted.values()) > 0, accepted
    assert sum(each.drafts.predicted_accepted for each in heard[True]) == accepted[DraftSource.PREDICTION]
