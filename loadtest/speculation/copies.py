"""Measures how many tokens copied drafts yield on rewrites of this repository's own files, without a model.

    python -m loadtest.speculation.copies [--files 60]

Each answer is a file as a commit left it. The prompt, the prediction, or both hold the file before the commit. A step
verifies one proposal and yields its accepted tokens and one more, as the engine's steps do.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from loadtest.processes import ROOT
from weft.engine.drafting.copying import NO_MATCH, CopyIndex, PredictionReader

SUFFIXES = (".py", ".md", ".h", ".cpp")
MAX_BYTES = 16_000
MIN_BYTES = 2_000


class Replay(NamedTuple):
    """Tokens of an answer, steps that generated them, and draft tokens that were verified and accepted."""

    tokens: int = 0
    steps: int = 0
    verified: int = 0
    accepted: int = 0


def replay(prompt: Sequence[int], answer: Sequence[int], prediction: Sequence[int] = ()) -> Replay:
    """Generate `answer` with the longer of the drafts that the prompt and earlier answer, or the prediction, give."""
    text = list(prompt)
    index = CopyIndex(text, len(prompt) + len(answer))
    reader = PredictionReader(prediction, text, len(text))
    place = steps = verified = accepted = 0
    while place < len(answer):
        copied = index.find(len(prompt))
        predicted = reader.find() if prediction else NO_MATCH
        drafts = reader.copy(predicted) if predicted.length >= copied.length else index.copy(copied)
        drafts = drafts[: len(answer) - place - 1]
        matching = next((i for i, draft in enumerate(drafts) if draft != answer[place + i]), len(drafts))
        text.extend(answer[place : place + matching + 1])
        place += matching + 1
        steps, verified, accepted = steps + 1, verified + len(drafts), accepted + matching
    return Replay(len(answer), steps, verified, accepted)


def rewrites(num_files: int) -> Iterator[tuple[str, str]]:
    """Return files of the newest commits, before and after the commit."""
    for commit in _git("log", "--format=%H", "--no-merges").split():
        changed = _git("diff-tree", "--no-commit-id", "-r", "--diff-filter=M", "--name-only", commit)
        for name in changed.splitlines():
            if num_files and name.endswith(SUFFIXES):
                old, new = _git("show", f"{commit}^:{name}"), _git("show", f"{commit}:{name}")
                if MIN_BYTES < len(new) < MAX_BYTES:
                    num_files -= 1
                    yield old, new
        if not num_files:
            return


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=True)
    return done.stdout.decode(errors="replace")


def main() -> None:
    """Print a row for each kind of prompt."""
    parser = argparse.ArgumentParser(description="tokens per step of copied drafts, on rewrites of this repository")
    parser.add_argument("--files", type=int, default=60)
    tokenizer = Tokenizer.from_file(str(ROOT / "models" / "weft-nano" / "tokenizer.json"))
    pairs = [(tokenizer.encode(old).ids, tokenizer.encode(new).ids) for old, new in rewrites(parser.parse_args().files)]
    kinds = {
        "fresh": [replay([], new) for _, new in pairs],
        "old file in the prompt": [replay(old, new) for old, new in pairs],
        "old file as the prediction": [replay([], new, old) for old, new in pairs],
        "both": [replay(old, new, old) for old, new in pairs],
    }
    print("| prompt | tokens | tokens per step | share accepted |")
    print("|---|---|---|---|")
    for name, done in kinds.items():
        tokens, steps, verified, accepted = (sum(column) for column in zip(*done, strict=True))
        print(f"| {name} | {tokens} | {tokens / steps:.2f} | {accepted / max(1, verified):.2f} |")


if __name__ == "__main__":
    main()
