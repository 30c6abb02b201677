"""The session of an agent that edits a file, through a real mesh, with and without drafts.

    python -m loadtest.speculation.agent [--model DIR] [--rounds 2] [--json figures.json]

Each of the 20 turns is a chat completion of the conversation so far: a tool call, an edit in search/replace blocks, the
whole file, or a short answer. Every turn runs with `"speculation": false` and without that field, the two in
alternating order. They have API keys of their own, so each finds only its own earlier turns in the prefix cache. Both
texts must be equal. The first round warms up.

Calls and answers are the model's own. Edits are replayed (`replay_worker`), as weft-nano cannot edit. Without --model
the mesh serves weft-nano enlarged to 191 million weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from loadtest.local_mesh import LocalMesh
from loadtest.processes import ROOT
from loadtest.report import machine, made_at, table
from loadtest.speculation.bench import default_model
from loadtest.speculation.replay_worker import replay_grammar
from weft.api_keys import ApiKey, digest_of, dump_keys, make_secret
from weft.cli.layout import free_ports

WORKER = "replay-0"
MODES = {"off": {"speculation": False}, "on": {}}
CALL, EDIT, REWRITE, ANSWER, ALL = "tool call", "edit", "rewrite", "answer", "all"
MAX_ANSWER_TOKENS = 24
MAX_CALL_TOKENS = 64

FILE = """class Stock:
    def __init__(self):
        self.items = {}

    def add(self, name, count):
        self.items[name] = count

    def sell(self, name, count):
        if self.items[name] < count:
            raise ValueError(name)
        self.items[name] -= count

    def total(self):
        return sum(self.items.values())
"""
# What the agent replaces in rounds of four turns, and whether it writes the whole file.
CHANGES = (
    ("def sell", "def ship", False),
    ("ValueError", "KeyError", False),
    ("self.items = {}", "self.items = dict()", True),
    ("def total", "def size", False),
    ("def add", "def put", False),
)
PATH = {"type": "string", "enum": ["stock.py", "test_stock.py"]}
FIELDS: dict[str, dict[str, Any]] = {
    "read_file": {"path": PATH, "first_line": {"type": "integer"}, "last_line": {"type": "integer"}},
    "search_text": {"path": PATH, "text": {"type": "string", "maxLength": 16}},
    "run_tests": {"path": PATH, "verbose": {"type": "boolean"}},
}


def _tool(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [_tool(name, fields) for name, fields in FIELDS.items()]


@dataclass(frozen=True, slots=True)
class Turn:
    """The message to the agent, and its action. `forced`: the tool that it calls, or the text that it writes."""

    kind: str
    told: str
    forced: str = ""


def session() -> Iterator[Turn]:
    """Yield the turns: for each change a look at the file, the change, a run of the tests, and an answer."""
    file = FILE
    for number, (old, new, is_whole) in enumerate(CHANGES):
        looked_up = "\n".join(line for line in file.splitlines() if old in line)
        changed = file.replace(old, new)
        yield Turn(CALL, f"Replace `{old}` by `{new}` in stock.py.", "search_text" if number else "read_file")
        edit = f"```python\n{changed}```\n" if is_whole else _blocks(file, changed)
        yield Turn(REWRITE if is_whole else EDIT, looked_up if number else file, edit)
        yield Turn(CALL, "The change is made.", "run_tests")
        yield Turn(ANSWER, f"{4 + number} passed")
        file = changed


def _blocks(old: str, new: str) -> str:
    """Return a search/replace block for each changed line."""
    lines = zip(old.splitlines(), new.splitlines(), strict=True)
    return "".join(f"<<<<<<< SEARCH\n{was}\n=======\n{now}\n>>>>>>> REPLACE\n" for was, now in lines if was != now)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer and its cost. `seconds`: from the request to the whole answer."""

    message: dict[str, Any]
    seconds: float
    tokens: int
    drafted: int
    accepted: int

    @property
    def text(self) -> tuple[str, list[tuple[str, str]]]:
        """What must be equal: the content, and the calls without their random ids."""
        calls = [call["function"] for call in self.message.get("tool_calls", ())]
        return self.message.get("content") or "", [(call["name"], call["arguments"]) for call in calls]


class Agent:
    """Holds a conversation with a model; `clients` has one client for each mode."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, clients: Mapping[str, OpenAI]) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._clients = clients
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": "You edit stock.py."}]
        self._num_turns = 0

    def take(self, turn: Turn) -> dict[str, Reply]:
        """Take the turn in every mode. Raises ValueError if the texts differ."""
        self._messages += self._told(turn)
        modes = list(MODES)[:: -1 if self._num_turns % 2 else 1]
        replies = {mode: self._ask(mode, turn) for mode in modes}
        off, on = replies["off"], replies["on"]
        if (off.text, off.tokens) != (on.text, on.tokens):
            raise ValueError(f"turn {self._num_turns + 1}: the text differs with drafts: {off.text} and {on.text}")
        self._messages.append(off.message)
        self._num_turns += 1
        return replies

    def _told(self, turn: Turn) -> list[dict[str, Any]]:
        calls = self._messages[-1].get("tool_calls", ())
        if not calls:
            return [{"role": "user", "content": turn.told}]
        return [{"role": "tool", "tool_call_id": call["id"], "content": turn.told} for call in calls]

    def _ask(self, mode: str, turn: Turn) -> Reply:
        fields = self._fields(turn, MODES[mode])
        began = time.perf_counter()
        raw = self._clients[mode].chat.completions.with_raw_response.create(**fields)
        seconds = time.perf_counter() - began
        said = raw.parse().choices[0].message
        message = said.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        counts = json.loads(raw.headers["x-weft-timeline"])["tokens"]
        return Reply(message, seconds, counts["completion"], counts["drafted"], counts["accepted"])

    def _fields(self, turn: Turn, extra: Mapping[str, Any]) -> dict[str, Any]:
        fields = {"model": self._model, "messages": self._messages, "tools": TOOLS, "temperature": 0}
        fields |= {"extra_headers": {"x-weft-timeline": "1"}, "extra_body": extra}
        if turn.kind == CALL:
            choice = {"type": "function", "function": {"name": turn.forced}}
            return fields | {"max_tokens": MAX_CALL_TOKENS, "tool_choice": choice}
        if turn.kind == ANSWER:
            return fields | {"max_tokens": MAX_ANSWER_TOKENS}
        token_ids = [*self._tokenizer(turn.forced, add_special_tokens=False).input_ids, self._tokenizer.eos_token_id]
        extra = {**extra, "guided_grammar": replay_grammar(token_ids)}
        return fields | {"max_tokens": len(token_ids), "extra_body": extra}


@dataclass(slots=True)
class Figures:
    """Turns of one kind in all rounds; seconds in total."""

    turns: int = 0
    tokens: int = 0
    seconds_off: float = 0.0
    seconds_on: float = 0.0
    drafted: int = 0
    accepted: int = 0

    def add(self, replies: Mapping[str, Reply]) -> None:
        off, on = replies["off"], replies["on"]
        self.turns += 1
        self.tokens += on.tokens
        self.seconds_off += off.seconds
        self.seconds_on += on.seconds
        self.drafted += on.drafted
        self.accepted += on.accepted

    def row(self, kind: str, num_rounds: int) -> list[str]:
        """Return the figures of one session."""
        # The first token of an answer comes with its prompt.
        tokens = self.tokens - self.turns
        return [
            *(kind, f"{self.turns / num_rounds:.0f}", f"{self.tokens / num_rounds:.0f}"),
            *(f"{self.seconds_off / num_rounds:.2f}", f"{self.seconds_on / num_rounds:.2f}"),
            f"{self.seconds_off / self.seconds_on:.2f}",
            f"{tokens / max(tokens - self.accepted, 1):.2f}",
            f"{self.accepted / self.drafted:.2f}" if self.drafted else "-",
        ]


def measure(agents: Sequence[Agent]) -> dict[str, Figures]:
    """Hold one session with each agent; return the figures by kind of turn, without the first session."""
    figures: dict[str, Figures] = {}
    for number, agent in enumerate(agents):
        for turn in session():
            replies = agent.take(turn)
            if number:
                figures.setdefault(turn.kind, Figures()).add(replies)
                figures.setdefault(ALL, Figures()).add(replies)
    return {**{kind: each for kind, each in figures.items() if kind != ALL}, ALL: figures[ALL]}


@contextmanager
def serving(model: Path, num_keys: int, options: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Run a mesh whose only active worker replays. Yield its URL and API keys with caches of their own."""
    secrets = [make_secret() for _ in range(num_keys)]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(dump_keys(ApiKey(f"key-{number}", digest_of(each)) for number, each in enumerate(secrets)))
        file.flush()
        with LocalMesh(str(model), 0, 0, num_both=1, options=(*options, "--keys", file.name)) as mesh:
            _replace_worker(mesh)
            yield mesh.url, secrets


def _replace_worker(mesh: LocalMesh) -> None:
    """Start the worker that replays, and drain the one that `weft up` has started."""
    settings = {name: value for name, value in mesh.child("worker-0").environ().items() if name.startswith("WEFT_")}
    settings |= {"WEFT_WORKER_ID": WORKER, "WEFT_PORT": str(free_ports(1)[0]), "WEFT_METRICS_PORT": "0"}
    mesh.start([sys.executable, "-m", "loadtest.speculation.replay_worker"], settings, folder=ROOT)
    mesh.wait(WORKER, lambda: WORKER in (reports := mesh.reports()) and reports[WORKER].ready)
    mesh.drain("worker-0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a directory with weft-nano's tokenizer and chat template")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    model = options.model or default_model()
    settings = ("--dtype", options.dtype, "--threads", str(options.threads))
    with serving(model, 2 * (1 + options.rounds), settings) as (url, keys):
        tokenizer = AutoTokenizer.from_pretrained(model)
        figures = measure([Agent(model.name, tokenizer, clients) for clients in clients_of(url, keys)])
    print(f"{made_at()}, {machine()}, {options.threads} threads, {options.dtype}, T=0, {model.name}\n")
    heads = ("turns", "number", "tokens", "off, s", "on, s", "ratio", "tokens per step", "accepted")
    print(table(heads, [each.row(kind, options.rounds) for kind, each in figures.items()]))
    print("\nall texts equal")
    if options.json:
        options.json.write_text(json.dumps({kind: asdict(each) for kind, each in figures.items()}, indent=2))


def clients_of(url: str, keys: Sequence[str]) -> list[dict[str, OpenAI]]:
    """Return a client for each mode, for each session."""
    clients = [OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300) for key in keys]
    return [dict(zip(MODES, pair, strict=True)) for pair in zip(clients[::2], clients[1::2], strict=True)]


if __name__ == "__main__":
    main()
