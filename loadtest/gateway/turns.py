"""`python -m loadtest.gateway.turns --turns 100`: what a long chat's next turn takes in the gateway, step by step.

Ids are made twice, of the whole text and of what is new of it. No mesh and no weights: `--model` may be any directory
with a checkpoint's tokenizer and chat template. Medians of several runs, each after the chat without its last turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TypeVar

from weft.kv.block_keys import block_keys
from weft_services.gateway.dialects.openai_requests import parse_chat
from weft_services.gateway.generation import Conversation
from weft_services.gateway.model import ServedModel, load_model

NANO = Path(__file__).parents[2] / "models" / "weft-nano"
WORDS = "the river goes to a town where Ann keeps her dog and what it said 12 times was not, they say, its name".split()
RUNS = 15
ResultT = TypeVar("ResultT")
Times = dict[str, list[float]]


def chat(turns: int, words: int, seed: int) -> list[dict[str, str]]:
    """Questions and answers, and one question more."""
    random = Random(seed)
    said = [" ".join(random.choices(WORDS, k=words)) for _ in range(2 * turns + 1)]
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]


def timed(times: list[float], work: Callable[[], ResultT]) -> ResultT:
    """In milliseconds."""
    started = time.perf_counter()
    result = work()
    times.append((time.perf_counter() - started) * 1e3)
    return result


def next_turn(model: ServedModel, messages: list[dict[str, str]], times: Times) -> int:
    """The chat without its last turn, then with it, which is measured; how many tokens that prompt has."""
    assert model.template is not None, "the model has no chat template"
    before = parse_chat(json.dumps({"model": "m", "messages": messages[:-2]}).encode()).prompts[0]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    assert isinstance(before, Conversation)
    model.chats.encode(model.template.render(before), b"")
    asked = timed(times["parse"], lambda: parse_chat(body)).prompts[0]
    assert isinstance(asked, Conversation)
    template = model.template
    text = timed(times["render"], lambda: template.render(asked))
    whole = timed(times["ids of the whole"], lambda: model.codec.encode(text, add_special_tokens=False))
    ids = timed(times["ids of what is new"], lambda: model.chats.encode(text, b""))
    assert ids == whole
    timed(times["block keys"], lambda: block_keys(ids, 64))
    return len(ids)


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=NANO)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--words", type=int, default=80, help="of each message")
    args = parser.parse_args()
    steps = ("parse", "render", "ids of the whole", "ids of what is new", "block keys")
    times: Times = {step: [] for step in steps}
    model = load_model(args.model, "m")
    for run in range(RUNS):
        num_tokens = next_turn(model, chat(args.turns, args.words, run), times)
    print(f"{args.turns} turns, {num_tokens} tokens, {args.model.name}'s tokenizer")
    for step in steps:
        print(f"{step:20} {statistics.median(times[step]):8.2f} ms")


if __name__ == "__main__":
    main()
