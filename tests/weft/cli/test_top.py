"""`weft top` on a fleet that is made up: what it shows, how wide, and rates that come of counts."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from weft.cli.top import RateHistory, Rates, WorkerCounts, render
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb


def worker(worker_id: str, **report: int) -> pb.WorkerStatus:
    is_prefill = worker_id.startswith("prefill")
    role = common_pb2.WORKER_ROLE_PREFILL if is_prefill else common_pb2.WORKER_ROLE_DECODE
    return pb.WorkerStatus(
        hello=pb.WorkerHello(
            worker=pb.WorkerAddress(worker_id=worker_id, boot_id=worker_id),
            role=role,
            model="weft-nano",
            num_blocks=100,
        ),
        report=pb.WorkerReport(ready=True, active_blocks=25, cached_blocks=50, free_blocks=25, **report),  # type: ignore[arg-type]
        report_age_ms=300,
    )


def fleet(generated: int, hand_offs: int) -> pb.ListWorkersResponse:
    prefill, decode = worker("prefill-0", queued_prefill_tokens=96), worker("decode-0", generated_tokens=generated)
    prefill.report.prefix.CopyFrom(pb.PrefixTally(looked_up_tokens=200, pool_tokens=100, dram_tokens=20))
    decode.report.hand_offs.add(
        prefill_worker_id="prefill-0", num_prompts=hand_offs, size_bytes=hand_offs << 20, num_failed=1
    )
    store = pb.StoreStatus(memory_bytes=1 << 30, memory_used_bytes=512 << 20)
    return pb.ListWorkersResponse(workers=[prefill, decode], store=store, waiting_requests=2)


def shown(width: int) -> str:
    history = RateHistory()
    history.take(fleet(1000, 7).workers, now=10.0)
    history.take((last := fleet(1300, 11)).workers, now=12.0)
    console = Console(file=io.StringIO(), width=width)
    console.print(render(last, history, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120, 180])
def test_the_map_says_what_the_fleet_does(width: int) -> None:
    text = shown(width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.replace("│", " ").split())
    expected = ["weft-nano 2 of 2 workers ready", "answers 150 tok/s", "from caches 60%", "hand-offs 2.0/s, 2.0 MiB/s"]
    expected += ["96 tokens to compute", "pool 50%, memory 10%, disk 0%", "KV 25%, 50% cached"]
    expected += ["2 wait for room", "512 MiB of 1.0 GiB"]
    expected += ["prefill-0 ━━▶ decode-0", "11 prompts, 2.0/s, 1 failed"]
    assert [piece for piece in expected if piece not in words] == []


def test_decode_card_shows_drafts_of_the_last_seconds() -> None:
    history = RateHistory()
    for now, (steps, tokens, drafts) in enumerate(((1000, 1000, 10), (1100, 1350, 510))):
        drafting = worker("decode-0", generating_sequences=steps, generating_tokens=tokens, generating_drafts=drafts)
        history.take([drafting], float(now))
    assert "3.50 tokens/step, 50% accepted" in pictured(drafting, history)
    drafting.report.generating_sequences, drafting.report.generating_tokens = 1300, 1550
    history.take([drafting], 3.0)
    history.take([drafting], 6.0)
    assert "decodes nothing now" in pictured(drafting, history)


def test_steps_without_drafts_are_shown_as_such() -> None:
    history = RateHistory()
    for now, steps in enumerate((10, 30)):
        plain = worker("decode-0", generating_sequences=steps, generating_tokens=steps, generating_drafts=5)
        history.take([plain], float(now))
    assert "1.00 tokens/step, no drafts" in pictured(plain, history)


def pictured(decode: pb.WorkerStatus, history: RateHistory) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(render(pb.ListWorkersResponse(workers=[decode]), history, 120))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_an_empty_fleet_is_a_map_too() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(render(pb.ListWorkersResponse(), RateHistory(), 120))
    assert isinstance(console.file, io.StringIO)
    assert "no workers" in console.file.getvalue()
    assert "no shared store" in console.file.getvalue()


def test_workers_that_load_are_counted() -> None:
    loading = pb.WorkerArrival(worker_id="decode-7", role=common_pb2.WORKER_ROLE_DECODE)
    assert "0 of 0 workers ready · 1 loading" in printed(pb.ListWorkersResponse(arrivals=[loading]), 120)


def printed(fleet: pb.ListWorkersResponse, width: int, height: int = 0) -> str:
    console, history = Console(file=io.StringIO(), width=width), RateHistory()
    history.take(fleet.workers, now=1.0)
    console.print(render(fleet, history, width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("height", [30, 50])
def test_what_a_terminal_has_no_room_for_is_counted(width: int, height: int) -> None:
    workers = [worker(f"{role}-{number}") for role in ("prefill", "decode") for number in range(40)]
    text = printed(pb.ListWorkersResponse(workers=workers), width, height)
    assert len(text.splitlines()) <= height
    assert text.count("more, for which") == 2
    assert "more, for which" not in printed(pb.ListWorkersResponse(workers=workers), width)


def test_workers_that_do_both_compute_prompts() -> None:
    both = worker("worker-0")
    both.hello.role = common_pb2.WORKER_ROLE_BOTH
    text = printed(pb.ListWorkersResponse(workers=[both]), 120)
    assert "no workers" not in text
    assert "by those that write answers" in text


def test_the_same_report_seen_twice_is_no_standstill() -> None:
    rates = Rates()
    for at, tokens in ((0.0, 0), (1.0, 100), (1.02, 100), (2.0, 200)):
        rates.take(WorkerCounts(at, 0, tokens, {}, 0))
    assert list(rates.generated) == [0.0, 100.0, 100.0, 100.0]


def test_a_worker_that_was_started_anew_begins_at_nothing() -> None:
    history = RateHistory()
    history.take(fleet(1000, 7).workers, now=1.0)
    again = fleet(10, 0)
    again.workers[1].hello.worker.boot_id = "another"
    history.take(again.workers, now=2.0)
    assert list(history.of(again.workers[1]).generated) == [0.0]
