"""Checks a folder of chat templates: `python -m loadtest.templates DIR`.

Each template renders every conversation of `conversations` by the gateway and by transformers, with and without special
tokens. Then it writes an assistant's calls, and the gateway reads them back. `--list` names what differs. The status is
1 if the gateway crashes, refuses a conversation that transformers renders, or takes a template for another format.
"""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from pathlib import Path

from loadtest.report import machine, made_at, table, verdict
from loadtest.templates.calling import Reading, Verdict, judge
from loadtest.templates.conversations import CONVERSATIONS
from loadtest.templates.rendering import SPECIAL, Outcome, Render, compare
from weft.errors import BadCheckpoint
from weft_services.gateway.text.chat_template import ChatTemplate

SHOWN = (Outcome.OTHER, Outcome.REFUSED_ALONE, Outcome.CRASH)
# Of the templates with calls, the part that must be read back.
MIN_READ = 110 / 124
MAX_SHOWN = 160


def main() -> int:
    options = _options()
    logging.disable(logging.WARNING)
    sources = {path.stem: path.read_text() for path in sorted(options.folder.glob("*.jinja"))}
    if not sources:
        raise SystemExit(f"{options.folder}: no *.jinja files; name a folder with chat templates")
    print(f"{made_at()}, {machine()}\n{len(sources)} templates, {len(CONVERSATIONS)} conversations\n")
    renders = {name: _renders(source) for name, source in sources.items()}
    readings = {name: judge(source) for name, source in sources.items()}
    if options.list:
        _list(renders, readings)
    outcomes = Counter(render.outcome for each in renders.values() for _, render in each)
    print(table(["renders", "number"], [(each, outcomes[each]) for each in Outcome]), "\n")
    counts = Counter(each.reading for each in readings.values())
    print(table(["calls", "templates"], [(each, counts[each]) for each in Reading]), "\n")
    num_calls = len(sources) - counts[Reading.NONE] - counts[Reading.UNLOADED]
    part = counts[Reading.READ] / num_calls if num_calls else 1
    print(f"read back {part:.1%} of {num_calls}:", verdict(part >= MIN_READ, f"{MIN_READ:.1%}"))
    num_faults = outcomes[Outcome.CRASH] + outcomes[Outcome.REFUSED_ALONE] + counts[Reading.WRONG]
    print("crashes, lone refusals, wrong formats:", verdict(num_faults == 0, "0"))
    return int(num_faults > 0 or part < MIN_READ)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of *.jinja files")
    parser.add_argument("--list", action="store_true", help="name the templates that differ, and how")
    return parser.parse_args()


def _renders(source: str) -> list[tuple[str, Render]]:
    """Return the renders of one template with their conversations' names, with special tokens and without."""
    found: list[tuple[str, Render]] = []
    for special in (SPECIAL, {}):
        try:
            template = ChatTemplate(source, special)
        except BadCheckpoint as error:
            return [("", Render(Outcome.CRASH, error=str(error)))]
        found += [(name, compare(source, template, body, special)) for name, body in CONVERSATIONS.items()]
    return found


def _list(renders: dict[str, list[tuple[str, Render]]], readings: dict[str, Verdict]) -> None:
    for template, each in renders.items():
        for name, render in each:
            if render.outcome in SHOWN:
                print(f"{template}, {name}: {render.outcome} {render.error[:MAX_SHOWN]}{_difference(render)}")
    for template, judged in readings.items():
        if judged.reading not in (Reading.READ, Reading.NONE):
            print(f"{template}: {judged.reading}, format {judged.tool_format}")
            print(*(f"    {each[: 2 * MAX_SHOWN]}" for each in judged.failures), sep="\n")
    print()


def _difference(render: Render) -> str:
    pairs = enumerate(zip(render.own, render.expected, strict=False))
    at = next((at for at, (own, other) in pairs if own != other), min(len(render.own), len(render.expected)))
    own, other = (text[max(0, at - 20) : at + 40] for text in (render.own, render.expected))
    return f"{own!r} for {other!r}" if own != other else ""


if __name__ == "__main__":
    raise SystemExit(main())
