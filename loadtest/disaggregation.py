"""Does splitting pay: two workers that compute prompts and tokens, against the same two as prefill and decode.

    python -m loadtest.disaggregation                                three rounds, a minute each and side
    python -m loadtest.disaggregation --chunk-tokens 512 --rounds 5  other steps, more rounds
    python -m loadtest.disaggregation --out docs/results     writes split.json, which loadtest.headlines reads

Short chats stream while long prompts arrive, both by chance at a fixed rate, the same requests for both sides. A worker
that does both writes no token while a chunk of a prompt computes; a decode worker of a pair never waits for one. How
many tokens come late is a matter of load: unless told a rate, long prompts come so often that one worker for them alone
is busy for `--long-load` of the time, by what one takes on the idle pair. Of two that do both, each then computes
prompts for half of that, and with the usual chunks more than a tenth of the chats' tokens meet one. Both
meshes run all the time, one process a worker on a core of its own, and are loaded in turn; the idle one costs nothing.
Times between tokens are those of the chats, as their client sees them. Random weights: what is said does not matter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtest.local_mesh import LocalMesh
from loadtest.small_model import make_checkpoint
from weft.bench.load import Load, Record, Target, open_target
from weft.bench.stats import gaps
from weft.bench.workload import WorkloadSpec, from_recipe

# how many prefill and decode workers, and workers that do both
SIDES = {"2 combined": (0, 0, 2), "prefill + decode": (1, 1, 0)}
SETTLE_SECONDS = 60.0
NUM_ALONE = 5


@dataclass(frozen=True, slots=True)
class Options:
    rounds: int
    seconds: float
    chat_rate: float
    chat_tokens: tuple[int, int]
    """Of a chat's prompt and its answer."""
    long_load: float
    """Share of one worker's time that long prompts take."""
    long_rate: float
    """A second; 0: as the load says."""
    long_tokens: tuple[int, int]
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class Figures:
    """One round of one side. Milliseconds, and tokens a second."""

    itl: tuple[float, float, float]
    """Between tokens of the chats: p50, p90, p99."""
    chat_ttft: float
    long_ttft: float
    output_rate: float
    prompt_rate: float
    failed: int


def percentile(values: Sequence[float], percent: int) -> float:
    """By nearest rank; NaN of nothing."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)] if values else math.nan


async def measure(target: Target, options: Options, seed: int) -> Figures:
    """One round: both kinds of requests at once, each at its own rate, to the end of the last."""

    async def send(rate: float, sizes: tuple[int, int], seed: int) -> list[Record]:
        count = max(1, round(rate * options.seconds))
        recipe = WorkloadSpec(count, prompt_tokens=sizes[0], output_tokens=sizes[1], spread=0.3, rate=rate, seed=seed)
        return await Load(target, from_recipe(recipe)).run(0, options.seconds + SETTLE_SECONDS)

    began = time.perf_counter()
    chats, longs = await asyncio.gather(
        send(options.chat_rate, options.chat_tokens, seed), send(options.long_rate, options.long_tokens, -seed)
    )
    seconds = time.perf_counter() - began
    between = [gap for chat in chats for gap in gaps(chat)]
    answered = [record for record in (*chats, *longs) if not record.error]
    return Figures(
        itl=(1000 * percentile(between, 50), 1000 * percentile(between, 90), 1000 * percentile(between, 99)),
        chat_ttft=1000 * percentile([each.first_token for each in chats if each.arrivals], 50),
        long_ttft=1000 * percentile([each.first_token for each in longs if each.arrivals], 50),
        output_rate=sum(each.output_tokens for each in answered) / seconds,
        prompt_rate=sum(each.prompt_tokens for each in answered) / seconds,
        failed=len(chats) + len(longs) - len(answered),
    )


async def seconds_of_a_long_prompt(target: Target, options: Options) -> float:
    """To its first token on an idle mesh, the median of some."""
    recipe = WorkloadSpec(NUM_ALONE, options.long_tokens[0], 0, 1, concurrency=1, seed=NUM_ALONE)
    alone = await Load(target, from_recipe(recipe)).run(1, SETTLE_SECONDS)
    return statistics.median(record.first_token for record in alone if not record.error)


async def compare(urls: dict[str, str], options: Options) -> dict[str, list[Figures]]:
    """Every round of both sides, in turn."""
    results: dict[str, list[Figures]] = {name: [] for name in urls}
    targets = {name: await open_target(url, "", "", False) for name, url in urls.items()}
    if not options.long_rate:
        seconds = await seconds_of_a_long_prompt(list(targets.values())[-1], options)
        options = replace(options, long_rate=options.long_load / seconds)
        print(f"a long prompt takes {seconds:.2f} s: {options.long_rate:.2f} a second", flush=True)
    for number in range(1, options.rounds + 1):
        for name, target in targets.items():
            figures = await measure(target, options, number)
            results[name].append(figures)
            print(f"round {number}, {name}: ITL p50 {figures.itl[0]:.1f} p90 {figures.itl[1]:.1f} ms", flush=True)
    for target in targets.values():
        await target.client.aclose()
    return results


def rows(results: dict[str, list[Figures]]) -> list[tuple[str, ...]]:
    """Medians over the rounds of both sides, and the pair's over the combined workers'."""
    measures: dict[str, Callable[[Figures], float]] = {
        "chats: time between tokens, p50 ms": lambda f: f.itl[0],
        "chats: time between tokens, p90 ms": lambda f: f.itl[1],
        "chats: time between tokens, p99 ms": lambda f: f.itl[2],
        "chats: TTFT p50, ms": lambda f: f.chat_ttft,
        "long prompts: TTFT p50, ms": lambda f: f.long_ttft,
        "output tokens a second": lambda f: f.output_rate,
        "prompt tokens a second": lambda f: f.prompt_rate,
        "requests that failed": lambda f: float(f.failed),
    }
    table: list[tuple[str, ...]] = []
    for name, read in measures.items():
        one, two = (statistics.median(map(read, rounds)) for rounds in results.values())
        table.append((name, f"{one:.1f}", f"{two:.1f}", f"{two / one:.2f}x" if one else ""))
    return table


def record(results: dict[str, list[Figures]], options: Options) -> str:
    """All rounds of both sides, as JSON."""
    sides = {name: [asdict(figures) for figures in rounds] for name, rounds in results.items()}
    return json.dumps({"options": asdict(options), "sides": sides}, indent=1) + "\n"


def recorded(text: str) -> dict[str, list[Figures]]:
    """The rounds out of that."""
    sides = json.loads(text)["sides"]
    return {
        name: [Figures(**{**figures, "itl": tuple(figures["itl"])}) for figures in rounds]
        for name, rounds in sides.items()
    }


def parse_options() -> tuple[Options, Path | None]:
    """The command line: what is asked, and where the figures go."""
    parser = argparse.ArgumentParser(description="Combined workers against a prefill and a decode worker.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals, a round and side")
    parser.add_argument("--chat-rate", type=float, default=3.0, help="chats a second")
    parser.add_argument("--chat-tokens", type=int, nargs=2, default=(64, 64), metavar=("PROMPT", "ANSWER"))
    parser.add_argument("--long-load", type=float, default=0.8, help="share of a worker's time for long prompts")
    parser.add_argument("--long-rate", type=float, default=0.0, help="long prompts a second, instead")
    parser.add_argument("--long-tokens", type=int, nargs=2, default=(2048, 8), metavar=("PROMPT", "ANSWER"))
    parser.add_argument("--chunk-tokens", type=int, default=128, help="prompt tokens in one step (WEFT_CHUNK_TOKENS)")
    parser.add_argument("--out", type=Path, help="a directory for split.json")
    given = parser.parse_args()
    options = Options(
        rounds=given.rounds,
        seconds=given.seconds,
        chat_rate=given.chat_rate,
        chat_tokens=tuple(given.chat_tokens),
        long_load=given.long_load,
        long_rate=given.long_rate,
        long_tokens=tuple(given.long_tokens),
        chunk_tokens=given.chunk_tokens,
    )
    return options, given.out


def main() -> None:
    """Measure and print."""
    options, out = parse_options()
    environment = {"WEFT_CHUNK_TOKENS": str(options.chunk_tokens)}
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_checkpoint(Path(folder) / "llama-30M"))
        with ExitStack() as stack:
            meshes = [LocalMesh(model, p, d, environment, both) for p, d, both in SIDES.values()]
            urls = {name: stack.enter_context(mesh).url for name, mesh in zip(SIDES, meshes, strict=True)}
            results = asyncio.run(compare(urls, options))
    table = Table(title=f"medians of {options.rounds} rounds, chunks of {options.chunk_tokens} tokens", box=None)
    headings = ("", *SIDES, "ratio")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows(results):
        table.add_row(*row)
    Console(width=110).print(table)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "split.json").write_text(record(results, options))


if __name__ == "__main__":
    main()
