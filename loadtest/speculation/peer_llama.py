"""llama.cpp's server as a peer of the speculation benchmark: one process for each answer, times and drafts from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from loadtest.processes import BenchError, Processes, answers, main_thread_seconds
from loadtest.servers.contestants import make_gguf
from loadtest.speculation.bench import OFF, Run
from loadtest.speculation.tasks import Prompt
from weft.cli.layout import free_ports
from weft.request import DraftCounts

START_SECONDS, ANSWER_SECONDS = 60.0, 600.0
CONTEXT_TOKENS = 2048
NGRAM_MOD = "ngram-mod"
# What a user of the server would set. The two numbers are the length of the looked-up n-gram and the number of drafts;
# without them the server looks up 12 tokens and drafts 48 (ngram-simple), or 24 and 48 to 64 (ngram-mod).
LLAMA_MODES: Mapping[str, Sequence[str]] = {
    OFF: (),
    "ngram-simple": ("--spec-type", "ngram-simple"),
    "ngram-simple 4, 15": (
        *("--spec-type", "ngram-simple"),
        *("--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "15"),
    ),
    NGRAM_MOD: ("--spec-type", "ngram-mod"),
}


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """The server beside `python`, with one slot.

    `clock`: "wall", or "cpu" for the CPU time of the server's main thread, which runs the model.
    """

    python: Path
    gguf: Path
    threads: int
    clock: str
    name: str = "llama.cpp"

    @property
    def modes(self) -> Sequence[str]:
        return tuple(LLAMA_MODES)

    def run(self, prompts: Mapping[str, Prompt], mode: str) -> Run:
        """Answer the prompts one after another by a new server; `ngram-mod` has one for each prompt. Raises BenchError.

        The n-grams of `ngram-mod` outlive a request, so an old server would have drafts from its other answers.
        """
        total = Run()
        for names in [[name] for name in prompts] if mode == NGRAM_MOD else [list(prompts)]:
            with Processes() as processes:
                url, process = self._start(processes, mode)
                for name in names:
                    total.add(self._run(name, url, prompts[name], process))
        return total

    def _run(self, name: str, url: str, prompt: Prompt, process: psutil.Process) -> Run:
        if self.clock == "wall":
            return to_run(name, self._answer(url, prompt))
        return self._run_by_cpu(name, url, prompt, process)

    def _run_by_cpu(self, name: str, url: str, prompt: Prompt, process: psutil.Process) -> Run:
        """Answer twice; the second answer finds the prompt's KV, so that its CPU time is that of decode steps."""
        self._answer(url, replace(prompt, max_tokens=1))
        before = main_thread_seconds(process)
        run = to_run(name, self._answer(url, prompt))
        # The last token of the prompt is computed again, which is one step more.
        return replace(run, seconds=main_thread_seconds(process) - before, tokens=run.tokens + 1, steps=run.steps + 1)

    def _answer(self, url: str, prompt: Prompt) -> dict[str, Any]:
        answer = httpx.post(f"{url}/completion", json=completion_body(prompt), timeout=ANSWER_SECONDS)
        if answer.status_code != httpx.codes.OK:
            raise BenchError(f"{self.name}: HTTP {answer.status_code}: {answer.text[:300]}")
        found: dict[str, Any] = answer.json()
        return found

    def close(self) -> None:
        """No process is left between runs."""

    def _start(self, processes: Processes, mode: str) -> tuple[str, psutil.Process]:
        (port,) = free_ports(1)
        threads = str(self.threads)
        process = processes.start(
            [
                *(str(self.python.parent / "llama-server"), "--model", str(self.gguf)),
                *("--host", "127.0.0.1", "--port", str(port), "--parallel", "1", "--ctx-size", str(CONTEXT_TOKENS)),
                *("--threads", threads, "--threads-batch", threads, *LLAMA_MODES[mode]),
            ]
        )
        processes.wait(self.name, answers(port, "/health"), START_SECONDS)
        return f"http://127.0.0.1:{port}", process


def open_llama(python: Path, model: Path, dtype: str, threads: int, clock: str) -> LlamaServer:
    return LlamaServer(python, make_gguf(python, model, dtype), threads, clock)


def completion_body(prompt: Prompt) -> dict[str, Any]:
    """Return the body of `/completion`: greedy, with the grammar that forces the same tokens as in our engine."""
    body: dict[str, Any] = {
        "prompt": list(prompt.token_ids),
        "n_predict": prompt.max_tokens,
        "temperature": 0,
        "samplers": ["temperature"],  # the others are skipped, because none changes the most likely token
        "return_tokens": True,
    }
    if prompt.replayed is not None:
        body["grammar"] = f"root ::= {' '.join(f'<[{token_id}]>' for token_id in prompt.replayed[:-1])}"
    elif prompt.grammar is not None:
        (grammar,) = json.loads(prompt.grammar)["grammars"]
        body["json_schema"] = grammar["json_schema"]
    return body


def to_run(name: str, answer: Mapping[str, Any]) -> Run:
    """Return one answer as a run; the server's time starts with the first token, as ours does."""
    timings = answer["timings"]
    drafts = DraftCounts(timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))
    num_tokens = timings["predicted_n"] - 1
    seconds = timings["predicted_ms"] / 1e3
    return Run(seconds, num_tokens, num_tokens - drafts.accepted, drafts, {name: list(answer["tokens"])})
