"""The two headline experiments of routing on one page, out of what they wrote: hits against the fleet's size by what
the router knows, and time between tokens of two workers that do both against the same two split.

    python -m loadtest.fleet hits --trace mooncake_conversation.jsonl --workers 8,64,1000 --load 0.95 --out docs/results
    python -m loadtest.fleet hits --trace mooncake_conversation.jsonl --workers 8,64 --cache 0.3,1,4 --load 0.95 ...
    python -m loadtest.disaggregation --out docs/results
    python -m loadtest.headlines

The last one makes routing.html there of fleet-hits.json and split.json, or of the one of them that there is; `--folder`
is another folder. Measures nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest import disaggregation
from loadtest.fleet import page

HITS, SPLIT, PAGE = "fleet-hits.json", "split.json", "routing.html"
FOLDER = Path(__file__).resolve().parent.parent / "docs" / "results"
# names of the runs, and what a router that is run so knows
SIGNALS = {
    "least requests": "how many requests each worker has",
    "load only": "tokens that wait and are held (our policy, blind)",
    "affinity": "the same, and where each session was",
    "prefix index": "the same, and who was given which prefix",
    "weft": "all of that",
    "weft and store": "all of that, with the shared store",
}


def hits_parts(text: str) -> list[str]:
    """Experiment (a): a table for each fleet, and lines over the fleets."""
    record = json.loads(text)
    figures: Mapping[str, list[dict[str, Any]]] = record["figures"]
    parts = [
        page.heading("(a) Hits at the peak"),
        page.text(
            f"Simulated workers ({record['machine']}), the scheduler's own policy. Trace {record['trace']} at "
            f"{record['load']:.0%} of what the prefill workers can do, one copy of the trace, with users of its own, "
            "for every eight workers. Ideal: what one cache without end would find."
        ),
    ]
    places = [(*place.split("/"),) for place in figures]
    for (size, cache), rows in zip(places, figures.values(), strict=True):
        parts.append(page.text(f"{size} workers, {cache} million tokens of cache on each"))
        parts.append(page.table(*_hits_table(rows)))
    for cache in dict.fromkeys(cache for _, cache in places):
        sizes = [size for size, each in places if each == cache]
        title = f"hits by what the router knows, {cache} million tokens of cache on each"
        parts += _hits_lines(title, "workers", sizes, [figures[f"{size}/{cache}"] for size in sizes])
    for size in dict.fromkeys(size for size, _ in places):
        caches = sorted((cache for each, cache in places if each == size), key=float)
        title = f"hits by what the router knows, {size} workers"
        rows_by_cache = [figures[f"{size}/{cache}"] for cache in caches]
        parts += _hits_lines(title, "million tokens of cache on each", caches, rows_by_cache)
    return parts


def _hits_lines(title: str, axis: str, ticks: list[str], rows: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Over fleets or caches, where there is more than one."""
    if len(ticks) < 2:
        return []
    by_signal: dict[str, list[float | None]] = {}
    for number, each in enumerate(rows):
        for row in each:
            by_signal.setdefault(row["policy"], [None] * len(ticks))[number] = 100 * row["of_ideal"]
    return [page.lines(title, (axis, "% of ideal hits"), ticks, by_signal)]


def _hits_table(rows: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], list[list[str]]]:
    titles = ("router", "it knows", "hits", "of ideal", "max/mean busy", "TTFT mean", "p99")
    return titles, [
        [
            row["policy"],
            SIGNALS.get(row["policy"], ""),
            f"{row['hit_share']:.1%}",
            f"{row['of_ideal']:.1%}",
            f"{row['imbalance']:.2f}",
            f"{row['ttft_mean']:.2f} s",
            f"{row['ttft_p99']:.1f} s",
        ]
        for row in rows
    ]


def split_parts(text: str) -> list[str]:
    """Experiment (b): medians of the rounds, and each round's p90."""
    options, results = json.loads(text)["options"], disaggregation.recorded(text)
    chats, longs = options["chat_tokens"], options["long_tokens"]
    rate, load = options["long_rate"], options["long_load"]
    asked = f"{rate:g} a second" if rate else f"{load:.0%} of one worker's time"
    rounds = [str(number) for number in range(1, options["rounds"] + 1)]
    p90 = {name: [figures.itl[1] for figures in each] for name, each in results.items()}
    return [
        page.heading("(b) Two workers that do both, or one that computes prompts and one that generates"),
        page.text(
            "Real processes, one a worker, 30 million weights, the same requests to both in turn: chats of about "
            f"{chats[0]} tokens and answers of {chats[1]}, {options['chat_rate']:g} a second, beside prompts of about "
            f"{longs[0]} ({asked}). Steps of {options['chunk_tokens']} prompt tokens at most. Medians of "
            f"{options['rounds']} rounds of {options['seconds']:g} s."
        ),
        page.table(("", *results, "ratio"), disaggregation.rows(results)),
        page.lines("chats: p90 between tokens, by round", ("round", "ms"), rounds, p90),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.headlines", description="The headline experiments' page.")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args(arguments).folder
    makers: Mapping[str, Callable[[str], list[str]]] = {HITS: hits_parts, SPLIT: split_parts}
    parts = [
        part for name, make in makers.items() if (folder / name).exists() for part in make((folder / name).read_text())
    ]
    if not parts:
        parser.error(f"neither {HITS} nor {SPLIT} is in {folder}")
    (folder / PAGE).write_text(page.page("Routing: the two headline experiments", parts))


if __name__ == "__main__":
    main()
