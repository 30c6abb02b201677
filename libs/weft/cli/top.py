"""`weft top`: the map of the mesh in a terminal, once a second, from the scheduler's list of workers."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.box import ROUNDED
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from weft.cli.status import (
    NO_DECODING,
    REFRESH_SECONDS,
    DecodeCounts,
    console,
    decode_counts,
    failures_reported,
    kv_use,
    list_workers,
    show_for_ever,
    state_of,
)
from weft.request import WorkerRole
from weft.rpc.client import open_channel
from weft.rpc.wire import role_from_wire
from weft_mesh.v1 import scheduler_service_pb2 as pb

COLOURS = {WorkerRole.PREFILL: "dark_orange3", WorkerRole.DECODE: "dark_cyan"}
STORE_COLOUR = "medium_purple3"
BAR_CELLS = 20
SPARKS = "▁▂▃▄▅▆▇█"
MAX_THREADS = 12
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# below this the sides stand one above the other
WIDE_COLUMNS = 96
# lines of a worker, and of all that is no worker
CARD_LINES, OTHER_LINES = 6, 8


def top(scheduler: str, once: bool) -> None:
    """Show the mesh of the scheduler at host:port until Ctrl-C, or one picture, which takes a second.

    Raises typer.Exit(1) after saying on stderr what is wrong and what to do.
    """
    with failures_reported("top", scheduler):
        asyncio.run(_top(scheduler, once))


async def _top(address: str, once: bool) -> None:
    history, screen = RateHistory(), console()
    height = 0 if once else screen.height
    async with open_channel(address) as channel:

        async def look() -> RenderableType:
            fleet = await list_workers(channel)
            history.take(fleet.workers, time.monotonic())
            return render(fleet, history, screen.width, height)

        first = await look()
        if once:
            await asyncio.sleep(REFRESH_SECONDS)  # a rate needs two pictures
            screen.print(await look())
        else:
            await show_for_ever(screen, address, first, look, is_whole=True)


def render(fleet: pb.ListWorkersResponse, history: RateHistory, width: int, height: int = 0) -> RenderableType:
    """Return the whole map in `width` columns, with as many workers as fit into `height` lines; 0: all."""
    sides = {role: [w for w in fleet.workers if role_from_wire(w.hello.role).can(role)] for role in COLOURS}
    # workers of both roles stand with the decode workers
    sides[WorkerRole.PREFILL] = [w for w in sides[WorkerRole.PREFILL] if w not in sides[WorkerRole.DECODE]]
    num_rows = max((height - OTHER_LINES) // CARD_LINES, 2) if height else len(fleet.workers)
    most = num_rows if width >= WIDE_COLUMNS or not height else num_rows // 2
    columns = [_side(role, workers, history, most) for role, workers in sides.items()]
    if not sides[WorkerRole.PREFILL] and any(role_from_wire(w.hello.role) is WorkerRole.BOTH for w in fleet.workers):
        columns[0] = Text.assemble(_title(WorkerRole.PREFILL), ("\nby those that write answers", "dim"))
    threads = _threads(sides[WorkerRole.DECODE], history)
    if width >= WIDE_COLUMNS:
        grid = Table.grid(padding=(0, 1), expand=True)
        for ratio in (8, 6, 8):
            grid.add_column(ratio=ratio, overflow="ellipsis")
        grid.add_row(columns[0], threads, columns[1])
        body: RenderableType = grid
    else:
        body = Group(columns[0], threads, columns[1])
    return Group(_totals(fleet, history), Text(), body, _store(fleet))


def _totals(fleet: pb.ListWorkersResponse, history: RateHistory) -> Text:
    workers = fleet.workers
    rates = [history.of(worker) for worker in workers]
    looked, found = sum(w.report.prefix.looked_up_tokens for w in workers), sum(map(_found, workers))
    models = ", ".join(dict.fromkeys(worker.hello.model for worker in workers)) or "no model"
    parts = [
        f"{sum(w.report.ready for w in workers)} of {len(workers)} workers ready",
        *([f"{len(fleet.arrivals)} loading"] if fleet.arrivals else []),
        f"answers {sum(rate.generated[-1] for rate in rates):,.0f} tok/s",
        f"prompts {sum(rate.prompt[-1] for rate in rates):,.0f} tok/s",
        f"from caches {found / looked:.0%}" if looked else "nothing looked up yet",
        f"hand-offs {sum(sum(rate.hand_offs.values()) for rate in rates):.1f}/s,"
        f" {_bytes(sum(rate.bytes_per_second for rate in rates))}/s",
        f"{fleet.waiting_requests:,} wait for room",
    ]
    return Text.assemble((models, "bold"), "  ", " · ".join(parts))


def _found(worker: pb.WorkerStatus) -> int:
    prefix = worker.report.prefix
    return prefix.pool_tokens + prefix.dram_tokens + prefix.nvme_tokens


def _title(role: WorkerRole) -> Text:
    work = "computes prompts" if role is WorkerRole.PREFILL else "writes answers"
    return Text.assemble((role.value, f"bold {COLOURS[role]}"), (f"  {work}", "dim"))


def _side(role: WorkerRole, workers: Sequence[pb.WorkerStatus], history: RateHistory, most: int) -> RenderableType:
    if not workers:
        return Group(_title(role), Text("no workers", style="red"))
    cards: list[RenderableType] = [_card(role, worker, history.of(worker)) for worker in workers[:most]]
    if left := len(workers) - len(cards):
        cards.append(Text(f"and {left:,} more, for which there is no room: `weft status` has them", style="yellow"))
    return Group(_title(role), *cards)


def _card(role: WorkerRole, worker: pb.WorkerStatus, rates: Rates) -> Panel:
    report, is_prefill = worker.report, role is WorkerRole.PREFILL
    tokens = report.queued_prefill_tokens if is_prefill else report.active_tokens
    series = list(rates.prompt if is_prefill else rates.generated)
    sequences = f"{report.num_running:,} running" + (f", {report.num_waiting:,} wait" if report.num_waiting else "")
    lines = [
        _pool(worker, COLOURS[role]),
        Text(f"{tokens:,} tokens {'to compute' if is_prefill else 'in flight'} · {sequences}"),
        Text.assemble(f"{series[-1]:,.0f} tok/s ", (_spark(series), COLOURS[role])),
    ]
    if is_prefill and (looked := report.prefix.looked_up_tokens):
        prefix = report.prefix
        tiers = (("pool", prefix.pool_tokens), ("memory", prefix.dram_tokens), ("disk", prefix.nvme_tokens))
        lines.append(Text("cached: " + ", ".join(f"{name} {found / looked:.0%}" for name, found in tiers)))
    if not is_prefill and report.generating_drafts:
        lines.append(Text(_drafts(rates.decoded)))
    layout = f" {worker.hello.layout}" if worker.hello.layout else ""
    title = Text.assemble((worker.hello.worker.worker_id, "bold"), f"{layout} ", state_of(report))
    return Panel(Group(*lines), title=title, title_align="left", box=ROUNDED, border_style="dim", padding=(0, 1))


def _drafts(counts: DecodeCounts) -> str:
    """Return what drafts brought lately."""
    if not counts.steps:
        return "decodes nothing now"
    accepted = f"{counts.accepted_share:.0%} accepted" if counts.drafts else "no drafts"
    return f"{counts.tokens_per_step:.2f} tokens/step, {accepted}"


def _pool(worker: pb.WorkerStatus, colour: str) -> Text:
    """Return a bar of the pool: in use, kept as cache, free."""
    use, kept = kv_use(worker), worker.report.cached_blocks / max(worker.hello.num_blocks, 1)
    return Text.assemble(
        *_bar(use, kept, colour, BAR_CELLS), f" KV {use:.0%}", (f", {kept:.0%} cached", "dim"), no_wrap=True
    )


def _bar(use: float, kept: float, colour: str, cells: int) -> list[tuple[str, str]]:
    num_used = min(round(use * cells), cells)
    num_kept = min(round(kept * cells), cells - num_used)
    return [("█" * num_used, colour), ("▒" * num_kept, "dim"), ("░" * (cells - num_used - num_kept), "bright_black")]


def _spark(series: Sequence[float]) -> str:
    highest = max(*series, 1.0)
    return "".join(SPARKS[min(int(value / highest * len(SPARKS)), len(SPARKS) - 1)] for value in series)


def _threads(decodes: Sequence[pb.WorkerStatus], history: RateHistory) -> RenderableType:
    """Return the hand-offs by pair of workers, the busiest first."""
    threads = [
        (history.of(worker).hand_offs.get(tally.prefill_worker_id, 0.0), worker.hello.worker.worker_id, tally)
        for worker in decodes
        for tally in worker.report.hand_offs
    ]
    threads.sort(key=lambda thread: (-thread[0], -thread[2].num_prompts))
    lines = []
    for rate, decode_id, tally in threads[:MAX_THREADS]:
        style = "bold bright_yellow" if rate > 0 else "dim"
        figures = f"  {tally.num_prompts:,} prompts" + (f", {rate:.1f}/s" if rate > 0 else "")
        failed = (f", {tally.num_failed:,} failed" if tally.num_failed else "", "red")
        lines.append(Text.assemble(tally.prefill_worker_id, (" ━━▶ ", style), decode_id))
        lines.append(Text.assemble((figures, "dim"), failed))
    return Group(Text("KV hand-offs", style="bold"), *(lines or [Text("none yet", style="dim")]))


def _store(fleet: pb.ListWorkersResponse) -> Text:
    if not fleet.HasField("store"):
        return Text("no shared store", style="dim")
    store, parts = fleet.store, [("shared store  ", f"bold {STORE_COLOUR}")]
    tiers = [("memory", store.memory_used_bytes, store.memory_bytes), ("disk", store.disk_used_bytes, store.disk_bytes)]
    for name, used, total in tiers:
        if total:
            bar = _bar(used / total, 0.0, STORE_COLOUR, BAR_CELLS // 2)
            parts += [(f"{name} ", ""), *bar, (f" {_bytes(used)} of {_bytes(total)}   ", "")]
    return Text.assemble(*parts)


def _bytes(number: float) -> str:
    power = 0
    while number >= 1000 and power < len(UNITS) - 1:
        number, power = number / 1024, power + 1
    return f"{number:.{1 if power and number < 100 else 0}f} {UNITS[power]}"


# reports and pictures both come once a second, and not together
WINDOW_SECONDS = 2.8
SAME_REPORT_SECONDS = 0.1
KEPT = 30


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """A worker's counters at a time."""

    at: float
    prompt_tokens: int
    generated_tokens: int
    hand_offs: dict[str, int]
    hand_off_bytes: int
    decoded: DecodeCounts = NO_DECODING


@dataclass(slots=True)
class Rates:
    """One boot of a worker: its latest counts, and tokens a second over the last half minute.

    `decoded`: what it decoded within the latest counts.
    """

    counts: deque[WorkerCounts] = field(default_factory=deque)
    prompt: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    generated: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    hand_offs: dict[str, float] = field(default_factory=dict)
    bytes_per_second: float = 0.0
    decoded: DecodeCounts = NO_DECODING

    def take(self, count: WorkerCounts) -> None:
        """Add the counts of a new picture; its report may be the one before."""
        if not self.counts or count.at - self.counts[-1].at > SAME_REPORT_SECONDS:
            self.counts.append(count)
        while len(self.counts) > 2 and count.at - self.counts[1].at > WINDOW_SECONDS:
            self.counts.popleft()
        first, last = self.counts[0], self.counts[-1]
        seconds = last.at - first.at
        per_second = 1.0 / seconds if seconds > 0 else 0.0
        self.prompt.append((last.prompt_tokens - first.prompt_tokens) * per_second)
        self.generated.append((last.generated_tokens - first.generated_tokens) * per_second)
        self.hand_offs = {
            lender: (num - first.hand_offs.get(lender, 0)) * per_second for lender, num in last.hand_offs.items()
        }
        self.bytes_per_second = (last.hand_off_bytes - first.hand_off_bytes) * per_second
        self.decoded = DecodeCounts(*(new - old for new, old in zip(last.decoded, first.decoded, strict=True)))


class RateHistory:
    """Rates of all live workers; call `take` with every list and its time."""

    def __init__(self) -> None:
        self._boots: dict[str, Rates] = {}

    def take(self, workers: Iterable[pb.WorkerStatus], now: float) -> None:
        """Update the rates of these workers; forget all others."""
        boots: dict[str, Rates] = {}
        for worker in workers:
            boot_id, tallies = worker.hello.worker.boot_id, worker.report.hand_offs
            boots[boot_id] = self._boots.get(boot_id) or Rates()
            boots[boot_id].take(
                WorkerCounts(
                    at=now - worker.report_age_ms / 1000,
                    prompt_tokens=worker.report.computed_prompt_tokens,
                    generated_tokens=worker.report.generated_tokens,
                    hand_offs={tally.prefill_worker_id: tally.num_prompts for tally in tallies},
                    hand_off_bytes=sum(tally.size_bytes for tally in tallies),
                    decoded=decode_counts(worker.report),
                )
            )
        self._boots = boots

    def of(self, worker: pb.WorkerStatus) -> Rates:
        """Return the rates of a worker of the latest picture."""
        return self._boots[worker.hello.worker.boot_id]
