"""Two workers with the role `both` against the same two as prefill and decode.

    python -m loadtest.disaggregation                                three rounds, a minute each and side
    python -m loadtest.disaggregation --chunk-tokens 512 --rounds 5  other steps, more rounds
    python -m loadtest.disaggregation --out docs/results     writes split.json

Short chats stream while long prompts arrive, both at random at a fixed rate (open loop), with the same requests for
both sides. A `both` worker generates no token while a chunk of a prompt computes; a decode worker never waits for one.
The share of late tokens depends on the load: unless `--long-rate` is given, long prompts come so often that one worker
for them alone would be busy for `--long-load` of its time, by what one takes on the idle pair. Both meshes run all the
time, a worker on a core of its own, and are loaded in turns. Times between tokens are those of the chats.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from loadtest.local_mesh import LocalMesh
from loadtest.models import make_checkpoint
from loadtest.report import percentile, table
from weft.bench.load import Load, Record, Target, open_target
from weft.bench.stats import gaps
from weft.bench.workload import WorkloadSpec, from_recipe

# prefill, decode and `both` workers
SIDES = {"2 combined": (0, 0, 2), "prefill + decode": (1, 1, 0)}
SETTLE_SECONDS = 60.0
NUM_ALONE = 5
Figures = dict[str, float]


async def measure(target: Target, options: argparse.Namespace, seed: int) -> Figures:
    """Run one round: both kinds of requests at once, until the last has ended."""

    async def send(rate: float, sizes: tuple[int, int], seed: int) -> list[Record]:
        count = max(1, round(rate * options.seconds))
        recipe = WorkloadSpec(count, prompt_tokens=sizes[0], output_tokens=sizes[1], spread=0.3, rate=rate, seed=seed)
        return await Load(target, from_recipe(recipe)).run(0, options.seconds + SETTLE_SECONDS)

    began = time.perf_counter()
    chats, longs = await asyncio.gather(
        send(options.chat_rate, options.chat_tokens, seed), send(options.long_rate, options.long_tokens, -seed)
    )
    seconds = time.perf_counter() - began
    between = [1000 * gap for chat in chats for gap in gaps(chat)]
    answered = [record for record in (*chats, *longs) if not record.error]
    figures = {f"chats: time between tokens, p{each} ms": percentile(between, each) for each in (50, 90, 99)}
    for name, records in (("chats", chats), ("long prompts", longs)):
        waits = [1000 * each.first_token for each in records if each.arrivals]
        figures[f"{name}: TTFT p50, ms"] = percentile(waits, 50)
    return {
        **figures,
        "output tokens a second": sum(each.output_tokens for each in answered) / seconds,
        "prompt tokens a second": sum(each.prompt_tokens for each in answered) / seconds,
        "requests that failed": float(len(chats) + len(longs) - len(answered)),
    }


async def seconds_of_a_long_prompt(target: Target, options: argparse.Namespace) -> float:
    """Return the median time to its first token on an idle mesh."""
    recipe = WorkloadSpec(NUM_ALONE, options.long_tokens[0], 0, 1, concurrency=1, seed=NUM_ALONE)
    alone = await Load(target, from_recipe(recipe)).run(1, SETTLE_SECONDS)
    return statistics.median(record.first_token for record in alone if not record.error)


async def compare(urls: dict[str, str], options: argparse.Namespace) -> dict[str, list[Figures]]:
    """Return the rounds of both sides, measured in turns."""
    results: dict[str, list[Figures]] = {name: [] for name in urls}
    targets = {name: await open_target(url, "", "", False) for name, url in urls.items()}
    if not options.long_rate:
        seconds = await seconds_of_a_long_prompt(list(targets.values())[-1], options)
        options.long_rate = options.long_load / seconds
        print(f"a long prompt takes {seconds:.2f} s: {options.long_rate:.2f} a second", flush=True)
    for number in range(1, options.rounds + 1):
        for name, target in targets.items():
            results[name].append(await measure(target, options, number))
            print(f"round {number}, {name}: {results[name][-1]}", flush=True)
    for target in targets.values():
        await target.client.aclose()
    return results


def rows(results: dict[str, list[Figures]]) -> list[tuple[str, ...]]:
    """Return medians over the rounds of both sides, and the second side's over the first's."""
    found: list[tuple[str, ...]] = []
    for name in next(iter(results.values()))[0]:
        one, two = (statistics.median(each[name] for each in rounds) for rounds in results.values())
        found.append((name, f"{one:.1f}", f"{two:.1f}", f"{two / one:.2f}x" if one else ""))
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals, a round and side")
    parser.add_argument("--chat-rate", type=float, default=3.0, help="chats a second")
    parser.add_argument("--chat-tokens", type=int, nargs=2, default=(64, 64), metavar=("PROMPT", "ANSWER"))
    parser.add_argument("--long-load", type=float, default=0.8, help="share of a worker's time for long prompts")
    parser.add_argument("--long-rate", type=float, default=0.0, help="long prompts a second, instead")
    parser.add_argument("--long-tokens", type=int, nargs=2, default=(2048, 8), metavar=("PROMPT", "ANSWER"))
    parser.add_argument("--chunk-tokens", type=int, default=128, help="prompt tokens in one step (WEFT_CHUNK_TOKENS)")
    parser.add_argument("--out", type=Path, help="a folder for split.json")
    return parser.parse_args()


def main() -> None:
    options = parse()
    environment = {"WEFT_CHUNK_TOKENS": str(options.chunk_tokens)}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = str(make_checkpoint(Path(folder) / "llama-30M"))
        meshes = [LocalMesh(model, p, d, environment, both) for p, d, both in SIDES.values()]
        urls = {name: stack.enter_context(mesh).url for name, mesh in zip(SIDES, meshes, strict=True)}
        results = asyncio.run(compare(urls, options))
    print(f"medians of {options.rounds} rounds, chunks of {options.chunk_tokens} tokens")
    print(table(("", *SIDES, "ratio"), rows(results)))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        record = {"options": vars(options), "sides": results}
        (options.out / "split.json").write_text(json.dumps(record, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
