"""`weft status`: shows the workers that the scheduler lists, as a table or JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import grpc
import typer
from google.protobuf.message import Message
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weft.rpc.client import open_channel
from weft.rpc.wire import role_from_wire
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_mesh.v1 import scheduler_service_pb2_grpc as pb_grpc

DEADLINE_SECONDS = 3.0
REFRESH_SECONDS = 1.0
BAR_CELLS = 8
# where there is no terminal to fit into, nothing is cut off
PIPE_COLUMNS = 180
ON_THE_LEFT = ("worker", "role", "model", "state", "KV in use", "transport")
# what a narrow terminal does without, in this order
FIRST_TO_GO = (
    *("transport", "blocks free/cached/active/quarantined", "accepted", "tokens/step", "model", "age", "role"),
    *("tokens booked", "waiting", "running"),
)
# a report this old is worth a colour
STALE_MS = 3000


def status(scheduler: str, watch: bool, as_json: bool) -> None:
    """Print the fleet of the scheduler at host:port; with `watch` again every second until Ctrl-C.

    Raises typer.Exit(1) after saying on stderr what is wrong and what to do.
    """
    with failures_reported("status", scheduler):
        asyncio.run(_status(scheduler, watch, as_json))


async def _status(address: str, watch: bool, as_json: bool) -> None:
    screen = console()
    async with open_channel(address) as channel:
        fleet = await list_workers(channel)
        if as_json and watch:
            await _print_for_ever(channel, address, fleet)
        elif as_json:
            print(json.dumps(as_dict(fleet), indent=2))
        elif watch:

            async def look() -> RenderableType:
                return render(await list_workers(channel), screen.width)

            await show_for_ever(screen, address, render(fleet, screen.width), look)
        else:
            screen.print(render(fleet, screen.width))


@contextmanager
def failures_reported(command: str, scheduler: str) -> Iterator[None]:
    """Turn an RPC error into a message on stderr and typer.Exit(1); Ctrl-C ends the block quietly."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        typer.secho(f"weft {command}: {explain(scheduler, error)}", fg="red", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        return


async def _print_for_ever(channel: grpc.aio.Channel, address: str, fleet: pb.ListWorkersResponse) -> NoReturn:
    """Print a line every second, or on stderr why the fleet cannot be seen."""
    while True:
        print(json.dumps(as_dict(fleet)), flush=True)
        is_new = False
        while not is_new:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                fleet, is_new = await list_workers(channel), True
            except grpc.aio.AioRpcError as error:
                typer.secho(f"weft status: {explain(address, error)}", fg="red", err=True)


async def show_for_ever(
    screen: Console,
    address: str,
    first: RenderableType,
    look: Callable[[], Awaitable[RenderableType]],
    is_whole: bool = False,
) -> None:
    """Show a picture every second, in one place of a terminal (all of it if `is_whole`), else one below the other.

    If the scheduler is away, the picture says why: a watcher outlives its restart.
    """

    async def next_picture() -> RenderableType:
        await asyncio.sleep(REFRESH_SECONDS)
        try:
            return await look()
        except grpc.aio.AioRpcError as error:
            return Text(explain(address, error), style="red")

    if not screen.is_terminal or screen.is_dumb_terminal:
        screen.print(first)
        while True:
            screen.print(await next_picture())
    with Live(first, console=screen, auto_refresh=False, screen=is_whole) as live:
        while True:
            live.update(await next_picture(), refresh=True)


async def list_workers(channel: grpc.aio.Channel) -> pb.ListWorkersResponse:
    """Return the scheduler's list of workers and arrivals."""
    stub = pb_grpc.FleetServiceStub(channel)
    return await stub.ListWorkers(pb.ListWorkersRequest(), timeout=DEADLINE_SECONDS)


def explain(address: str, error: grpc.aio.AioRpcError) -> str:
    """Return what is wrong at that address, and what to do next."""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return (
            f"what answers at {address} is no scheduler.\n"
            "Its address is in the log of `weft up`; name it with --scheduler HOST:PORT."
        )
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return (
            f"no scheduler answers at {address}, which was asked {_how_it_was_asked()}: {error.details()}.\n"
            "Is the mesh running? Start one with `weft up`, or name another scheduler with --scheduler HOST:PORT."
        )
    return f"the scheduler at {address} failed: {error.code().name.lower()}: {error.details()}"


def _how_it_was_asked() -> str:
    """Return how this command connects, as a mesh with TLS and a client without cannot talk."""
    folder = os.environ.get("WEFT_TLS_DIR")
    return f"with the certificate in {folder} (WEFT_TLS_DIR)" if folder else "without TLS (WEFT_TLS_DIR is not set)"


def console() -> Console:
    """Return a console as wide as the terminal, or PIPE_COLUMNS wide without one."""
    return Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)


def render(fleet: pb.ListWorkersResponse, width: int) -> RenderableType:
    """Return the table and its totals line; it drops columns to fit into `width`."""
    rows = [_row(worker) for worker in fleet.workers]
    models = {worker.hello.model for worker in fleet.workers} | {arrival.model for arrival in fleet.arrivals}
    for arrival in fleet.arrivals:
        rows.append(dict.fromkeys(rows[0] if rows else ON_THE_LEFT, Text("")) | _arrival_row(arrival))
    if not rows:
        return Text("no worker has joined, and none says that it loads its model; look at the log of `weft up`.")
    titles = list(rows[0])
    # with several models, which one it is says more than its role, which its name tells too
    kept_longest = "model" if len(models) > 1 else ""
    for title in ("", *(title for title in FIRST_TO_GO if title != kept_longest)):
        titles = [kept for kept in titles if kept != title]
        table = _table(titles, rows)
        if Console(width=PIPE_COLUMNS).measure(table).maximum <= width:
            break
    return Group(table, Text(""), Text(totals_line(fleet), style="bold"))


def _table(titles: Sequence[str], rows: Iterable[dict[str, Text]]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 1), pad_edge=False)
    for title in titles:
        table.add_column(title, no_wrap=True, justify="left" if title in ON_THE_LEFT else "right")
    for row in rows:
        table.add_row(*(row[title] for title in titles))
    return table


def state_of(report: pb.WorkerReport) -> Text:
    """Return the state of a worker in a word or two."""
    if report.ready:
        return Text("ready", style="green")
    if report.full:
        return Text("full", style="yellow")
    if report.asleep:
        return Text("asleep", style="blue")
    return Text("draining", style="yellow") if report.draining else Text("not ready", style="red")


def _loading(arrival: pb.WorkerArrival) -> Text:
    """Return the phase of a loading worker, its progress and its duration."""
    share = f" {arrival.done_bytes / arrival.total_bytes:.0%}" if arrival.total_bytes else ""
    return Text(f"{arrival.phase}{share}, {arrival.since_ms / 1000:.0f} s", style="cyan")


def _arrival_row(arrival: pb.WorkerArrival) -> dict[str, Text]:
    return {
        "worker": Text(arrival.worker_id, style="bold"),
        "role": Text(role_from_wire(arrival.role).value),
        "model": Text(arrival.model),
        "state": _loading(arrival),
    }


def _row(worker: pb.WorkerStatus) -> dict[str, Text]:
    """Return the cells of a worker by column title."""
    hello, report = worker.hello, worker.report
    blocks = (report.free_blocks, report.cached_blocks, report.active_blocks, report.quarantined_blocks)
    return {
        "worker": Text(hello.worker.worker_id, style="bold"),
        "role": Text(" ".join(filter(None, (role_from_wire(hello.role).value, hello.layout)))),
        "model": Text(hello.model),
        "state": state_of(report),
        "running": Text(f"{report.num_running:,}"),
        "waiting": Text(f"{report.num_waiting:,}"),
        **_decode_cells(decode_counts(report)),
        "tokens booked": Text(f"{worker.booked_prefill_tokens + worker.booked_decode_tokens:,}"),
        "KV in use": _bar(kv_use(worker)),
        "blocks free/cached/active/quarantined": Text("/".join(map(str, blocks))),
        "transport": Text(hello.transport),
        "age": Text(f"{worker.report_age_ms / 1000:.1f} s", style="yellow" if worker.report_age_ms > STALE_MS else ""),
    }


class DecodeCounts(NamedTuple):
    """Decode steps of a worker, each counted once for every sequence in it, the tokens they gained and their drafts."""

    steps: int = 0
    tokens: int = 0
    drafts: int = 0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a sequence gained in a step; there must be steps."""
        return self.tokens / self.steps

    @property
    def accepted_share(self) -> float:
        """Share of the drafts that became part of an answer; there must be drafts."""
        return (self.tokens - self.steps) / self.drafts


NO_DECODING = DecodeCounts()


def decode_counts(report: pb.WorkerReport) -> DecodeCounts:
    """Return the counts since the worker's start."""
    return DecodeCounts(report.generating_sequences, report.generating_tokens, report.generating_drafts)


def _decode_cells(counts: DecodeCounts) -> dict[str, Text]:
    return {
        "tokens/step": Text(f"{counts.tokens_per_step:.2f}" if counts.steps else ""),
        "accepted": Text(f"{counts.accepted_share:.0%}" if counts.drafts else ""),
    }


def kv_use(worker: pb.WorkerStatus) -> float:
    """Return the share of the pool that is held and cannot be evicted, 0 to 1."""
    report = worker.report
    return (report.active_blocks + report.quarantined_blocks) / max(worker.hello.num_blocks, 1)


def _bar(share: float) -> Text:
    filled = min(round(share * BAR_CELLS), BAR_CELLS)
    colour = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
    return Text.assemble(("█" * filled, colour), ("░" * (BAR_CELLS - filled), "dim"), f" {share:4.0%}")


def as_dict(fleet: pb.ListWorkersResponse) -> dict[str, Any]:
    """Return the fleet for programs, with names and units of the wire contract."""
    arrivals = [{**_plain(arrival), "role": role_from_wire(arrival.role).value} for arrival in fleet.arrivals]
    workers = [_worker_dict(worker) for worker in fleet.workers]
    return {"workers": workers, "arrivals": arrivals, "totals": totals(fleet)}


def _worker_dict(worker: pb.WorkerStatus) -> dict[str, Any]:
    hello, report = worker.hello, worker.report
    return {
        "worker_id": hello.worker.worker_id,
        "boot_id": hello.worker.boot_id,
        "address": hello.worker.address,
        "metrics_address": hello.metrics_address,
        "role": role_from_wire(hello.role).value,
        "model": hello.model,
        "transport": hello.transport,
        "layout": hello.layout,
        "num_blocks": hello.num_blocks,
        "block_tokens": hello.fingerprint.block_tokens,
        "max_context_tokens": hello.max_context_tokens,
        "kv_use": round(kv_use(worker), 4),
        "booked_requests": worker.booked_requests,
        "booked_prefill_tokens": worker.booked_prefill_tokens,
        "booked_decode_tokens": worker.booked_decode_tokens,
        "report_age_ms": worker.report_age_ms,
        # its role now is that of the hello that the scheduler gives
        **{name: value for name, value in _plain(report).items() if name != "role"},
    }


def _plain(message: Message) -> dict[str, Any]:
    """Return every field, also unset ones. 64-bit numbers stay numbers, unlike in protobuf's own JSON."""
    return {field.name: _value(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _value(value: Any) -> Any:
    if isinstance(value, Message):
        return _plain(value)
    return [_value(each) for each in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def totals(fleet: pb.ListWorkersResponse) -> dict[str, Any]:
    """Return the totals of all workers."""
    workers = fleet.workers
    held = sum(w.report.active_blocks + w.report.quarantined_blocks for w in workers)
    return {
        "workers": len(workers),
        "ready": sum(w.report.ready for w in workers),
        "loading": len(fleet.arrivals),
        "running": sum(w.report.num_running for w in workers),
        "waiting": sum(w.report.num_waiting for w in workers),
        "booked_tokens": sum(w.booked_prefill_tokens + w.booked_decode_tokens for w in workers),
        "kv_use": round(held / max(sum(w.hello.num_blocks for w in workers), 1), 4),
        "generated_tokens": sum(w.report.generated_tokens for w in workers),
        "computed_prompt_tokens": sum(w.report.computed_prompt_tokens for w in workers),
    }


def totals_line(fleet: pb.ListWorkersResponse) -> str:
    """Return the totals in one line for people."""
    sums = totals(fleet)
    loading = f", {sums['loading']} loading" if sums["loading"] else ""
    return (
        f"{sums['workers']} workers, {sums['ready']} ready{loading}"
        f" · running {sums['running']:,} · waiting {sums['waiting']:,}"
        f" · {sums['booked_tokens']:,} tokens booked · KV {sums['kv_use']:.0%} in use"
        f" · since start {sums['computed_prompt_tokens']:,} prompt tokens computed,"
        f" {sums['generated_tokens']:,} generated"
    )
