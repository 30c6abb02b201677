"""The data maker: reproducible, split in two without overlap, and true to its own tools and facts."""

import random

import jsonschema  # type: ignore[import-untyped]
import pytest
from training.weft_nano.corpus import LISTENING_WEIGHT, Encoder, Stage, collate, make_pool
from training.weft_nano.dialogues import Dialogue, make_dialogue
from training.weft_nano.entities import CLOSED_KINDS, KINDS, Source, is_held_out
from transformers import PreTrainedTokenizerFast


def dialogues(seed: int, is_held_out_side: bool = False, count: int = 40, tokens: int = 600) -> list[Dialogue]:
    source = Source(random.Random(seed), is_held_out_side)
    return [make_dialogue(source, tokens) for _ in range(count)]


def test_a_seed_gives_the_same_dialogues_again() -> None:
    assert dialogues(1) == dialogues(1)
    assert dialogues(1) != dialogues(2)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - CLOSED_KINDS))
@pytest.mark.parametrize("side", [False, True])
def test_open_values_belong_to_one_side_of_the_split(kind: str, side: bool) -> None:
    source = Source(random.Random(5), side)
    assert all(is_held_out(KINDS[kind](source)) == side for _ in range(50))


@pytest.mark.parametrize("side", [False, True])
def test_every_expected_call_fits_the_schema_it_was_given(side: bool) -> None:
    calls = 0
    for dialogue in dialogues(6, side):
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in dialogue.tools}
        for probe in dialogue.probes:
            if probe.call:
                jsonschema.validate(probe.call["arguments"], schemas[probe.call["name"]])
                calls += 1
    assert calls > 20


def test_every_fact_asked_for_was_told_before() -> None:
    facts = 0
    for dialogue in dialogues(7):
        for probe in dialogue.probes:
            if probe.fact:
                told = " ".join(m["content"] or "" for m in dialogue.messages[: probe.index - 1])
                assert probe.fact.value in told
                assert dialogue.messages[probe.index]["content"] == probe.fact.answer
                facts += 1
    assert facts > 100


def test_roles_alternate_and_tools_answer_calls() -> None:
    for dialogue in dialogues(8):
        roles = [m["role"] for m in dialogue.messages]
        assert roles.count("system") <= 1
        assert "system" not in roles[1:]
        for earlier, later in zip(dialogue.messages, dialogue.messages[1:], strict=False):
            assert (later["role"] == "tool") == ("tool_calls" in earlier)
        assert roles[-1] == "assistant"


def test_a_drill_has_no_tools_and_much_to_copy() -> None:
    source = Source(random.Random(9))
    drills = [make_dialogue(source, 400, "drill") for _ in range(20)]
    assert not any(drill.tools for drill in drills)
    assert sum(1 for drill in drills for probe in drill.probes if probe.fact) >= 60


def test_weights_mark_what_the_assistant_says(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = Encoder(tokenizer)
    (dialogue,) = dialogues(10, count=1)
    example = encoder.encode(dialogue)
    spoken = [m for m in dialogue.messages if m["role"] == "assistant"]
    assert len(example.spans) == len(spoken)
    for (first, end), message in zip(example.spans, spoken, strict=True):
        assert example.token_ids[end - 1] == encoder.eos_id
        if not message.get("tool_calls"):
            assert tokenizer.decode(example.token_ids[first : end - 1]) == message["content"]
    batch = collate([example], encoder.pad_id)
    first, end = example.spans[0]
    assert batch.weights[0, first:end].eq(1.0).all()
    assert batch.weights[0, :first].max() <= LISTENING_WEIGHT
    assert batch.weights[0, len(example.token_ids) :].eq(0.0).all()


def test_batches_keep_to_their_size(tokenizer: PreTrainedTokenizerFast) -> None:
    stage = Stage(until=1.0, max_tokens=256, tokens_per_batch=2048, drills=0.5)
    for batch in make_pool(Encoder(tokenizer), Source(random.Random(11)), stage):
        assert batch.token_ids.shape == batch.weights.shape
        assert batch.token_ids.numel() <= 2048 + 32 * batch.token_ids.shape[0]
        assert batch.num_tokens <= batch.token_ids.numel()
