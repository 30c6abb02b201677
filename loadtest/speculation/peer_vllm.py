"""vLLM as a peer of the speculation benchmark: one process for each mode, which stays open between prompts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from loadtest.engine.cpu_vllm import environment
from loadtest.processes import ROOT, BenchError, Processes
from loadtest.speculation.bench import OFF, Run
from loadtest.speculation.tasks import Prompt
from weft.request import DraftCounts

# The first start compiles; later ones find that in vLLM's cache.
START_SECONDS, ANSWER_SECONDS = 400.0, 300.0
NGRAM, EAGLE = "ngram 4, 15", "eagle3, 5"
VLLM_MODES: Mapping[str, Mapping[str, Any] | None] = {
    OFF: None,
    NGRAM: {"method": "ngram", "num_speculative_tokens": 15, "prompt_lookup_max": 4, "prompt_lookup_min": 4},
    EAGLE: {"method": "eagle3", "num_speculative_tokens": 5},
}


@dataclass(slots=True)
class _Server:
    """The connection to a driver's process, and what ends with it: the process, its log, its socket's folder."""

    connection: Connection
    owned: ExitStack


@dataclass(slots=True)
class VllmPeer:
    """vLLM in the environment of `python`. `head`: the folder of a draft head as vLLM reads it, None for none."""

    python: Path
    model: Path
    head: Path | None
    dtype: str
    threads: int
    clock: str
    name: str = "vLLM"
    _servers: dict[str, _Server] = field(default_factory=dict)

    @property
    def modes(self) -> Sequence[str]:
        return tuple(mode for mode in VLLM_MODES if mode != EAGLE or self.head is not None)

    def run(self, prompts: Mapping[str, Prompt], mode: str) -> Run:
        """Answer the prompts one after another. Raises BenchError."""
        total = Run()
        for name, prompt in prompts.items():
            total.add(to_run(name, self._ask(mode, request_body(prompt))))
        return total

    def close(self) -> None:
        for server in self._servers.values():
            server.owned.close()
        self._servers.clear()

    def _ask(self, mode: str, body: Mapping[str, Any]) -> dict[str, Any]:
        server = self._servers.get(mode) or self._start(mode)
        try:
            server.connection.send_bytes(json.dumps(body).encode())
            if not server.connection.poll(ANSWER_SECONDS):
                raise BenchError(f"no answer in {ANSWER_SECONDS:.0f} s")
            answer: dict[str, Any] = json.loads(server.connection.recv_bytes())
        except (EOFError, OSError, BenchError) as error:
            self._servers.pop(mode).owned.close()
            raise BenchError(f"{self.name} {mode}: {error or 'the process ended'}") from error
        if "error" in answer:
            self._servers.pop(mode).owned.close()  # An engine that failed in a step may not go on.
            raise BenchError(f"{self.name} {mode}: {answer['error']}")
        return answer

    def _start(self, mode: str) -> _Server:
        with ExitStack() as owned:
            socket = Path(owned.enter_context(tempfile.TemporaryDirectory())) / "socket"
            processes = owned.enter_context(Processes())
            settings = environment(str(self.python.parent.parent), self.threads)
            in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            processes.start(self._command(mode, socket), settings | in_process, folder=ROOT)
            processes.wait(f"{self.name} {mode}", socket.exists, START_SECONDS)
            connection = owned.enter_context(Client(str(socket), "AF_UNIX"))
            server = self._servers[mode] = _Server(connection, owned.pop_all())
        return server

    def _command(self, mode: str, socket: Path) -> list[str]:
        command = [str(self.python), "-m", "loadtest.speculation.vllm_driver", "--model", str(self.model)]
        command += ["--dtype", self.dtype, "--clock", self.clock, "--socket", str(socket)]
        settings = VLLM_MODES[mode]
        if settings is None:
            return command
        drafter = {"model": str(self.head)} if mode == EAGLE else {}
        return [*command, "--speculative", json.dumps({**settings, **drafter})]


def open_vllm(python: Path, model: Path, dtype: str, threads: int, clock: str) -> VllmPeer:
    draft = model / "draft"
    head = write_head(draft, model / "draft-vllm") if draft.is_dir() else None
    return VllmPeer(python, model, head, dtype, threads, clock)


def write_head(source: Path, out: Path) -> Path:
    """Write an EAGLE-3 head with the layer ids that vLLM expects, and return its folder.

    vLLM takes the state before a layer, other engines that after one, so that its ids are higher by one.
    """
    config = json.loads((source / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = config["eagle_config"]["boundaries"]
    out.mkdir(exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = out / "model.safetensors"
    weights.unlink(missing_ok=True)
    weights.symlink_to(source.resolve() / "model.safetensors")
    return out


def request_body(prompt: Prompt) -> dict[str, Any]:
    """Return what the driver needs of a prompt."""
    schema = None
    if prompt.replayed is None and prompt.grammar is not None:
        (grammar,) = json.loads(prompt.grammar)["grammars"]
        schema = grammar["json_schema"]
    return {
        "token_ids": prompt.token_ids,
        "max_tokens": prompt.max_tokens,
        "replayed": prompt.replayed,
        "json_schema": schema,
    }


def to_run(name: str, answer: Mapping[str, Any]) -> Run:
    """Return one answer as a run; a draft is a row that is not the only one of its step."""
    num_tokens, steps = len(answer["tokens"]) - 1, answer["steps"]
    drafts = DraftCounts(answer["rows"] - steps, num_tokens - steps)
    return Run(answer["seconds"], num_tokens, steps, drafts, {name: list(answer["tokens"])})
