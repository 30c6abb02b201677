"""Drives a running mesh over the OpenAI HTTP API; prints throughput, latencies, cached tokens and errors.

    python -m loadtest.mesh_bench                                 the mesh of `weft up` on this machine
    python -m loadtest.mesh_bench --concurrency 1,8 --requests 16 --prompt-tokens 256 --output-tokens 64
    python -m loadtest.mesh_bench --peer http://127.0.0.1:8001    another server under the same load, and the ratio
    python -m loadtest.mesh_bench --shared-tokens 128             every prompt begins with the same 128 tokens

A cell is one server at one concurrency: that many clients stream completions one after another until all requests are
done or the time is over. Prompts are real text (this repository's own pages, or --text FILE), cut to about the asked
number of tokens by the first server's own count. No prompt is asked twice of a server; both get the same ones.
Rounds alternate between the servers; the table shows medians over the rounds, so compare figures of one run only.

TTFT: request sent to first text. ITL: time between two pieces of text of one answer. Both over all requests of a cell.
Answers go on past the end token (`ignore_eos`), so that every one has the asked length. Speaks plain OpenAI.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import platform
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.openai_client import Sample, Server, ServerError, ask, open_server

ROOT = Path(__file__).resolve().parent.parent
# a figure's key and its title in the table
FIGURES = {
    "requests_per_second": "req/s",
    "output_tokens_per_second": "out tok/s",
    "ttft_ms_p50": "TTFT p50",
    "ttft_ms_p90": "p90",
    "ttft_ms_p99": "p99",
    "itl_ms_p50": "ITL p50",
    "itl_ms_p90": "p90",
    "itl_ms_p99": "p99",
}


@dataclass(frozen=True, slots=True)
class Options:
    """What to ask for. Times in seconds; `requests` and `max_seconds` bound one cell."""

    url: str
    peer: str
    concurrency: tuple[int, ...]
    requests: int
    prompt_tokens: int
    shared_tokens: int
    output_tokens: int
    rounds: int
    max_seconds: float
    seed: int
    text: str
    out: str


def read_text(path: str) -> str:
    """A file, or this repository's own prose; white space folded."""
    files = [Path(path)] if path else [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md", ROOT / "LICENSE"]
    return " ".join(" ".join(file.read_text() for file in files if file.exists()).split())


def cut_prompts(text: str, options: Options, chars_per_token: float, rng: random.Random) -> list[str]:
    """One prompt a request: what all share, a word that nobody else has, and text from a place of its own."""
    shared = text[: round(options.shared_tokens * chars_per_token)]
    size = max(round((options.prompt_tokens - options.shared_tokens) * chars_per_token), 1)
    endless = text * (1 + math.ceil(size / len(text)))
    starts = [0, *(index + 1 for index, letter in enumerate(text) if letter == " ")]
    rng.shuffle(starts)
    chosen = [starts[number % len(starts)] for number in range(options.requests)]
    return [f"{shared} {rng.getrandbits(32):08x} {endless[start : start + size]}" for start in chosen]


async def run_cell(server: Server, prompts: Sequence[str], concurrency: int, options: Options) -> dict[str, Any]:
    """All prompts through that many clients; what is not done in time counts as an error."""
    waiting: Iterator[str] = iter(prompts)
    samples: list[Sample] = []

    async def client() -> None:
        for prompt in waiting:
            samples.append(await ask(server, prompt, options.output_tokens))

    began = time.perf_counter()
    try:
        async with asyncio.timeout(options.max_seconds), asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())
    except TimeoutError:
        samples.extend(Sample(error="out of time") for _ in range(len(prompts) - len(samples)))
    return summarize(samples, time.perf_counter() - began)


def summarize(samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """Figures of one cell; latencies in milliseconds over all requests that were answered."""
    done = [sample for sample in samples if not sample.error]
    figures: dict[str, Any] = {
        "requests_per_second": len(done) / seconds,
        "output_tokens_per_second": sum(sample.output_tokens for sample in done) / seconds,
        "cached_share": sum(s.cached_tokens for s in done) / max(sum(s.prompt_tokens for s in done), 1),
        "prompt_tokens_mean": statistics.fmean(s.prompt_tokens for s in done) if done else 0.0,
        "errors": dict(Counter(sample.error for sample in samples if sample.error)),
    }
    gaps = [gap for sample in done for gap in sample.gaps]
    for name, values in (("ttft", [sample.ttft for sample in done]), ("itl", gaps)):
        for percent in (50, 90, 99):
            figures[f"{name}_ms_p{percent}"] = 1000 * percentile(values, percent)
    return figures


def percentile(values: Sequence[float], percent: int) -> float:
    """Nearest rank; not a number where there are no values."""
    if not values:
        return math.nan
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def median_cell(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figure by figure the median over the rounds that have it; errors are added up."""
    errors: Counter[str] = Counter()
    for cell in rounds:
        errors.update(cell["errors"])
    medians = {key: middle(cell[key] for cell in rounds) for key in rounds[0] if key != "errors"}
    return {**medians, "errors": dict(errors)}


def middle(values: Iterable[float]) -> float:
    """The median of those that are numbers: a round in which nothing was answered has no latencies."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


async def measure(servers: Sequence[Server], text: str, options: Options) -> dict[str, list[list[dict[str, Any]]]]:
    """Every round of every cell: by server, then by concurrency in the order of the options."""
    results: dict[str, list[list[dict[str, Any]]]] = {s.name: [[] for _ in options.concurrency] for s in servers}
    for number in range(options.rounds):
        for index, concurrency in enumerate(options.concurrency):
            for server in servers:
                rng = random.Random(f"{options.seed}/{number}/{concurrency}")
                prompts = cut_prompts(text, options, servers[0].chars_per_token, rng)
                cell = await run_cell(server, prompts, concurrency, options)
                results[server.name][index].append(cell)
                where = f"round {number + 1} of {options.rounds}, {concurrency} clients, {server.name}"
                print(f"{where}: {cell['output_tokens_per_second']:.1f} tok/s", file=sys.stderr)
    return results


def render(results: dict[str, list[list[dict[str, Any]]]], options: Options) -> Table:
    """Medians as a table, times in milliseconds; with a peer its row and the ratio to it beneath."""
    size = f"{options.prompt_tokens} + {options.output_tokens} tokens"
    title = f"{options.requests} requests of {size}, medians of {options.rounds} rounds, times in ms"
    table = Table(title=title, box=None, padding=(0, 1))
    for heading in ("clients", "server", *FIGURES.values(), "cached", "errors"):
        table.add_column(heading, justify="left" if heading == "server" else "right")
    for index, concurrency in enumerate(options.concurrency):
        cells = [median_cell(by_concurrency[index]) for by_concurrency in results.values()]
        for name, cell in zip(results, cells, strict=True):
            numbers = [f"{cell[key]:.1f}" if cell[key] < 100 else f"{cell[key]:.0f}" for key in FIGURES]
            errors = ", ".join(f"{count} x {error}" for error, count in cell["errors"].items())
            table.add_row(str(concurrency), name, *numbers, f"{cell['cached_share']:.0%}", errors or "0")
        if len(cells) > 1:
            ratios = [f"{cells[0][key] / cells[1][key]:.2f}x" if cells[1][key] else "" for key in FIGURES]
            table.add_row("", "mesh / peer", *ratios, "", "", style="bold")
    return table


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Load an OpenAI server and print what it gives.", epilog="See the module's docstring."
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the mesh")
    parser.add_argument("--peer", default="", help="another OpenAI server, measured in turn with the mesh")
    parser.add_argument("--concurrency", default="1,8,32", help="clients at once, one cell each")
    parser.add_argument("--requests", type=int, default=32, help="a cell")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--shared-tokens", type=int, default=0, help="of those, the same in every prompt")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-seconds", type=float, default=120.0, help="a cell")
    parser.add_argument("--seed", type=int, default=time.time_ns(), help="the same seed asks the same prompts again")
    parser.add_argument("--text", default="", help="a file to cut prompts from")
    parser.add_argument("--out", default="", help="a JSON file for every round's figures")
    values = vars(parser.parse_args(arguments))
    values["concurrency"] = tuple(int(part) for part in values["concurrency"].split(","))
    return Options(**values)


async def run(options: Options) -> dict[str, list[list[dict[str, Any]]]]:
    """Open the servers, measure, close. Raises ServerError."""
    text = read_text(options.text)
    urls = {"mesh": options.url, "peer": options.peer} if options.peer else {"mesh": options.url}
    servers = [await open_server(name, url, text) for name, url in urls.items()]
    try:
        return await measure(servers, text, options)
    finally:
        for server in servers:
            await server.client.aclose()


def main() -> None:
    """Measure, print, write."""
    options = parse_options()
    try:
        results = asyncio.run(run(options))
    except ServerError as error:
        sys.exit(f"mesh_bench: {error}")
    Console(width=None if sys.stdout.isatty() else 160).print(render(results, options))
    if options.out:
        machine = f"{platform.machine()} {platform.python_version()}"
        record = {"options": asdict(options), "machine": machine, "time": time.time(), "rounds": results}
        Path(options.out).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
