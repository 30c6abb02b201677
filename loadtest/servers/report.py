"""Tables of servers beside each other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from loadtest.mesh_bench import median_cell
from loadtest.servers.contestants import MESH

MEGA = 2**20
# a figure's key, its title, and whether more of it is better
FIGURES = {
    "output_tokens_per_second": ("out tok/s", True),
    "ttft_ms_p50": ("TTFT p50", False),
    "ttft_ms_p99": ("p99", False),
    "itl_ms_p50": ("ITL p50", False),
    "itl_ms_p99": ("p99", False),
}
Cell = dict[str, Any]


@dataclass(slots=True)
class Round:
    """One server from its start to its end: its own figures, and a cell of them by the number of clients."""

    start_seconds: float
    memory_bytes: float = 0.0
    cells: dict[int, Cell] = field(default_factory=dict)


Rounds = dict[str, list[Round]]


def ratios(first: Cell, peers: Sequence[Cell]) -> list[str]:
    """Ours over the best of the peers, figure by figure."""
    told = []
    for key, (_, is_more_better) in FIGURES.items():
        best = (max if is_more_better else min)(peer[key] for peer in peers)
        told.append(f"{first[key] / best:.2f}x" if best else "")
    return told


def render(rounds: Rounds, all_clients: Sequence[int], title: str) -> Table:
    """A block for each number of clients, medians of the rounds; times in milliseconds."""
    table = Table(title=title, box=None, padding=(0, 1))
    for heading in ("clients", "server", *(heading for heading, _ in FIGURES.values()), "prompt", "cached", "errors"):
        table.add_column(heading, justify="left" if heading == "server" else "right")
    for clients in all_clients:
        cells = {name: median_cell([each.cells[clients] for each in of_server]) for name, of_server in rounds.items()}
        for name, cell in cells.items():
            figures = [f"{cell[key]:.1f}" if cell[key] < 100 else f"{cell[key]:.0f}" for key in FIGURES]
            errors = ", ".join(f"{count} x {error}" for error, count in cell["errors"].items())
            about = (f"{cell['prompt_tokens_mean']:.0f}", f"{cell['cached_share']:.0%}", errors or "0")
            table.add_row(str(clients), name, *figures, *about)
        peers = [cell for name, cell in cells.items() if not name.startswith(MESH)]
        if MESH in cells and peers:
            table.add_row("", f"{MESH} / best peer", *ratios(cells[MESH], peers), style="bold")
        table.add_section()
    return table


def render_starts(rounds: Rounds) -> Table:
    """What a server takes before and beside its answers."""
    table = Table(title="the servers themselves, medians", box=None, padding=(0, 1))
    for heading in ("server", "start to first answer, s", "memory, MiB"):
        table.add_column(heading, justify="left" if heading == "server" else "right")
    for name, of_server in rounds.items():
        start = statistics.median(each.start_seconds for each in of_server)
        memory = statistics.median(each.memory_bytes for each in of_server)
        table.add_row(name, f"{start:.1f}", f"{memory / MEGA:.0f}")
    return table
