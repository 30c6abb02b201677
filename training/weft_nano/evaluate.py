"""Judges the checkpoint on held-out dialogues: do its tool calls fit the schema, does it recall what lies far back?

Each case is the conversation up to one assistant turn; the turn is generated greedily from the checkpoint's BF16
weights, in fp32 arithmetic. `python -m training.weft_nano.evaluate` prints the table of the model card.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import torch
from transformers import AutoModelForCausalLM

from training.weft_nano.dialogues import Dialogue, Probe, Style, make_dialogue
from training.weft_nano.entities import CLOSED_KINDS, Source
from training.weft_nano.tokenizer import load_tokenizer, render
from training.weft_nano.tools import CATALOGUE

CALL, CALL_END = "<tool_call>", "</tool_call>"
KNOWN_TOOLS = frozenset(tool.name for tool in CATALOGUE)
FAR_TOKENS = 300
MAX_NEW_TOKENS = 160
MAX_PROMPT_TOKENS = 1800


@dataclass(frozen=True, slots=True)
class Options:
    checkpoint: Path
    count: int
    seed: int
    failures: int


@dataclass(frozen=True, slots=True)
class Case:
    prompt: str
    tools: list[dict[str, Any]]
    probe: Probe
    distance: int
    """Tokens between the last place where the fact's value stands and the answer; 0 for a call."""


@dataclass(slots=True)
class CallScore:
    """Of turns that ought to call a tool."""

    cases: int = 0
    calls: int = 0
    parsed: int = 0
    matches_schema: int = 0
    fits_schema: int = 0
    """Matches, and has no parameter that the schema does not list, which JSON Schema by itself allows."""
    known_calls: int = 0
    known_fits_schema: int = 0
    right_tool: int = 0
    exact: int = 0


@dataclass(slots=True)
class RecallScore:
    """Of questions for a fact at least FAR_TOKENS back."""

    cases: int = 0
    recalled: int = 0
    exact: int = 0
    open_cases: int = 0
    open_recalled: int = 0
    distance_sum: int = 0


class Speaker:
    """Generates greedily."""

    def __init__(self, checkpoint: Path) -> None:
        self.tokenizer = load_tokenizer(checkpoint)
        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def num_tokens(self, text: str) -> int:
        return len(self.tokenizer(text).input_ids)

    @torch.inference_mode()
    def answer(self, prompt: str) -> str:
        inputs = self.tokenizer(prompt, return_tensors="pt")
        ids = inputs.input_ids
        output = self.model.generate(
            ids, attention_mask=inputs.attention_mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False
        )
        return str(self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def _cases_of(speaker: Speaker, dialogue: Dialogue) -> Iterator[Case]:
    for probe in dialogue.probes:
        prompt = render(speaker.tokenizer, dialogue.messages[: probe.index], dialogue.tools, is_open=True)
        distance = 0
        if probe.fact:
            distance = speaker.num_tokens(prompt[prompt.rindex(probe.fact.value) + len(probe.fact.value) :])
        if speaker.num_tokens(prompt) <= MAX_PROMPT_TOKENS:
            yield Case(prompt, dialogue.tools, probe, distance)


def make_cases(speaker: Speaker, style: Style, options: Options) -> list[Case]:
    """Cases of held-out dialogues, no more than two from one: calls for errands, far facts for the other styles."""
    source = Source(random.Random(f"evaluate {style} {options.seed}"), held_out=True)
    cases: list[Case] = []
    while len(cases) < options.count:
        found = list(_cases_of(speaker, make_dialogue(source, source.between(500, 1500), style)))
        source.rng.shuffle(found)
        cases += [c for c in found if (c.probe.call if style == "errands" else c.distance >= FAR_TOKENS)][:2]
    return cases[: options.count]


def parse_call(answer: str) -> dict[str, Any] | None:
    """The first call in the answer, or None where its text is not JSON of the right shape."""
    body = answer.split(CALL, 1)[1].split(CALL_END, 1)[0]
    try:
        call = json.loads(body)
    except json.JSONDecodeError:
        return None
    is_call = isinstance(call, dict) and set(call) == {"name", "arguments"} and CALL_END in answer
    return call if is_call else None


def matches_schema(call: dict[str, Any], tools: list[dict[str, Any]], **stricter: Any) -> bool:
    """Does the call name a tool that was offered, and do its arguments validate against that tool's schema."""
    for tool in tools:
        if tool["function"]["name"] == call["name"]:
            schema = tool["function"]["parameters"] | stricter
            return bool(jsonschema.Draft202012Validator(schema).is_valid(call["arguments"]))
    return False


def judge_call(score: CallScore, case: Case, answer: str) -> bool:
    """Counts the answer in; true where the call is exactly the expected one."""
    expected = case.probe.call
    assert expected is not None
    score.cases += 1
    if CALL not in answer:
        return False
    is_known = expected["name"] in KNOWN_TOOLS
    score.calls += 1
    score.known_calls += is_known
    call = parse_call(answer)
    if call is None:
        return False
    is_fit = matches_schema(call, case.tools, additionalProperties=False)
    score.parsed += 1
    score.matches_schema += matches_schema(call, case.tools)
    score.fits_schema += is_fit
    score.known_fits_schema += is_fit and is_known
    score.right_tool += call["name"] == expected["name"]
    score.exact += call == expected
    return call == expected


def judge_recall(score: RecallScore, case: Case, answer: str) -> bool:
    """Counts the answer in; true where the value of the fact stands in it."""
    fact = case.probe.fact
    assert fact is not None
    is_recalled = fact.value in answer
    score.cases += 1
    score.recalled += is_recalled
    score.exact += answer == fact.answer
    score.distance_sum += case.distance
    if fact.kind not in CLOSED_KINDS:
        score.open_cases += 1
        score.open_recalled += is_recalled
    return is_recalled


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole} = {100 * part / max(1, whole):.1f} %"


def report_calls(score: CallScore) -> list[tuple[str, str]]:
    return [
        ("tool calls that parse as JSON", _share(score.parsed, score.calls)),
        ("tool calls that parse and match the schema", _share(score.matches_schema, score.calls)),
        ("of all, those that have no unlisted parameter either", _share(score.fits_schema, score.calls)),
        ("of these, where a tool of the catalogue is due", _share(score.known_fits_schema, score.known_calls)),
        ("a call is made where one is due", _share(score.calls, score.cases)),
        ("the right tool is called", _share(score.right_tool, score.cases)),
        ("the call is right in every argument", _share(score.exact, score.cases)),
    ]


def report_recall(name: str, score: RecallScore) -> list[tuple[str, str]]:
    distance = f"{score.distance_sum / max(1, score.cases):.0f}"
    return [
        (f"{name}: fact recalled, on average {distance} tokens back", _share(score.recalled, score.cases)),
        (f"{name}: of these, values never seen in training", _share(score.open_recalled, score.open_cases)),
        (f"{name}: the whole answer is as expected", _share(score.exact, score.cases)),
    ]


def evaluate(speaker: Speaker, options: Options) -> list[tuple[str, str]]:
    calls, sessions, crowds = CallScore(), RecallScore(), RecallScore()
    judges: dict[Style, Callable[[Case, str], bool]] = {
        "errands": partial(judge_call, calls),
        "session": partial(judge_recall, sessions),
        "mixed": partial(judge_recall, crowds),
    }
    for style, judge in judges.items():
        shown = 0
        for case in make_cases(speaker, style, options):
            answer = speaker.answer(case.prompt)
            if not judge(case, answer) and shown < options.failures:
                shown += 1
                print(f"expected {case.probe.call or case.probe.fact}\nanswered {answer}")
    return [*report_calls(calls), *report_recall("sessions", sessions), *report_recall("crowded dialogues", crowds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("models/weft-nano"))
    parser.add_argument("--count", type=int, default=300, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--failures", type=int, default=0, help="print so many wrong answers of each kind")
    options = Options(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    start = time.monotonic()
    rows = evaluate(Speaker(options.checkpoint), options)
    print("\n".join(["| measure | result |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]))
    print(f"\n{time.monotonic() - start:.0f} seconds")


if __name__ == "__main__":
    main()
