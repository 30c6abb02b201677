"""`weft status`: its table, its JSON, workers that load, and a fleet that is watched."""

from __future__ import annotations

import io
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from weft.cli.fleet_commands import drain
from weft.cli.main import app
from weft.cli.status import as_dict, render, status, totals_line
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_mesh.v1 import scheduler_service_pb2_grpc as pb_grpc


def worker(worker_id: str, ready: bool = True, active_blocks: int = 20, age_ms: int = 400) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        hello=pb.WorkerHello(
            worker=pb.WorkerAddress(worker_id=worker_id, boot_id="b", address="127.0.0.1:1"),
            role=common_pb2.WORKER_ROLE_DECODE,
            model="weft-nano",
            fingerprint=common_pb2.ModelFingerprint(block_tokens=16),
            num_blocks=100,
            max_context_tokens=2048,
            transport="mooncake",
        ),
        report=pb.WorkerReport(
            num_running=3,
            free_blocks=70,
            cached_blocks=5,
            active_blocks=active_blocks,
            quarantined_blocks=5,
            ready=ready,
        ),
        booked_prefill_tokens=1000,
        booked_decode_tokens=2345,
        booked_requests=7,
        report_age_ms=age_ms,
    )


class ListOnly(pb_grpc.FleetServiceServicer):
    """A scheduler of which nothing but the list is asked."""

    def __init__(self, answers: list[list[pb.WorkerStatus]]) -> None:
        self._answers = answers
        self._not_yet = [grpc.StatusCode.NOT_FOUND]

    def Join(self, request_iterator: Any, context: Any) -> Any:
        raise NotImplementedError

    def Announce(self, request_iterator: Any, context: Any) -> Any:
        raise NotImplementedError

    def Drain(self, request: Any, context: Any) -> Any:
        if request.worker_id != "decode-0":
            context.abort(grpc.StatusCode.NOT_FOUND, f"no worker {request.worker_id!r} is live")
        return pb.DrainResponse()

    def SetRole(self, request: Any, context: Any) -> Any:
        if request.role == common_pb2.WORKER_ROLE_PREFILL:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{request.worker_id} is the last decode worker of 'm'")
        return pb.SetRoleResponse()

    def Sleep(self, request: Any, context: Any) -> Any:
        if request.worker_id == "decode-1" and self._not_yet:  # at first it has left and not yet joined anew
            context.abort(self._not_yet.pop(), "no worker 'decode-1' is live")
        if request.worker_id not in ("decode-0", "decode-1"):
            context.abort(grpc.StatusCode.NOT_FOUND, f"no worker {request.worker_id!r} is live")
        if not (request.undo or request.even_last):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "decode-0 is the last decode worker of 'm' that is ready")
        return pb.SleepResponse()

    def ListWorkers(self, request: Any, context: Any) -> Any:
        workers = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return pb.ListWorkersResponse(workers=workers)


@pytest.fixture
def fleet() -> list[list[pb.WorkerStatus]]:
    """What the scheduler answers, call by call; the last one stays."""
    return [[worker("decode-0"), worker("decode-1", ready=False)]]


@contextmanager
def serving(servicer: pb_grpc.FleetServiceServicer) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    pb_grpc.add_FleetServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.fixture
def address(fleet: list[list[pb.WorkerStatus]]) -> Iterator[str]:
    with serving(ListOnly(fleet)) as address:
        yield address


def shown(workers: list[pb.WorkerStatus], width: int = 200, arrivals: Sequence[pb.WorkerArrival] = ()) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(pb.ListWorkersResponse(workers=workers, arrivals=arrivals), width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_worker_has_a_row_and_the_fleet_a_line(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    status(address, watch=False, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("decode-0")]
    assert row.split()[1:7] == ["decode", "weft-nano", "ready", "3", "0", "3,345"]
    assert row.split()[8:] == ["25%", "70/5/20/5", "mooncake", "0.4", "s"]
    assert "not ready" in next(line for line in lines if line.startswith("decode-1"))
    assert lines[-1].startswith("2 workers, 1 ready · running 6 · waiting 0 · 6,690 tokens booked · KV 25% in use")


def test_as_json_it_carries_every_field_of_the_report(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    status(address, watch=False, as_json=True)
    fleet = json.loads(capsys.readouterr().out)
    first = fleet["workers"][0]
    assert (first["worker_id"], first["role"], first["kv_use"]) == ("decode-0", "decode", 0.25)
    assert {field.name for field in pb.WorkerReport.DESCRIPTOR.fields} <= first.keys()
    assert fleet["totals"]["booked_tokens"] == 6690


def test_an_empty_fleet_says_why_it_may_be_empty() -> None:
    assert "no worker has joined" in shown([])
    assert totals_line(pb.ListWorkersResponse()).startswith("0 workers, 0 ready ·")


@pytest.mark.parametrize("width", [72, 80, 100, 120, 160])
def test_a_narrow_terminal_gets_fewer_columns_and_no_cut_ones(width: int) -> None:
    lines = shown([worker("decode-0")], width).splitlines()
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= width
    for part in ("decode-0", "ready", "3,345", "25%"):
        assert part in lines[1]


def test_a_full_pool_fills_the_bar() -> None:
    assert "████████ 100%" in shown([worker("decode-0", active_blocks=95)])
    assert "░░░░░░░░   5%" in shown([worker("decode-0", active_blocks=0)])


def test_tokens_per_step_and_accepted_drafts_are_shown() -> None:
    drafting = worker("decode-0")
    drafting.report.generating_sequences, drafting.report.generating_tokens = 200, 482
    drafting.report.generating_drafts = 376
    header, row = shown([drafting]).splitlines()[:2]
    assert row[header.index("tokens/step") :].split()[:2] == ["2.41", "75%"]


def test_accepted_drafts_are_blank_without_drafts() -> None:
    decoding = worker("decode-0")
    decoding.report.generating_sequences = decoding.report.generating_tokens = 200
    header, row = shown([decoding]).splitlines()[:2]
    assert row[header.index("tokens/step") :].split()[:2] == ["1.00", "3,345"]


def test_without_a_scheduler_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(typer.Exit) as caught:
            status(address, watch=False, as_json=False)
    assert caught.value.exit_code == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert f"no scheduler answers at {address}, which was asked without TLS (WEFT_TLS_DIR is not set): " in said.err
    assert "weft up" in said.err


def test_another_service_at_that_address_is_named_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with pytest.raises(typer.Exit):
        status(f"127.0.0.1:{port}", watch=False, as_json=False)
    server.stop(0).wait()
    assert "is no scheduler" in capsys.readouterr().err


def test_the_command_takes_the_address(address: str) -> None:
    result = CliRunner().invoke(app, ["status", "--scheduler", address, "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["totals"]["workers"] == 2


def test_what_is_nested_in_a_report_is_json_too() -> None:
    told = worker("decode-0")
    told.report.hand_offs.add(prefill_worker_id="prefill-0", size_bytes=1 << 40)
    (shown,) = json.loads(json.dumps(as_dict(pb.ListWorkersResponse(workers=[told]))))["workers"]
    assert shown["hand_offs"] == [
        {"prefill_worker_id": "prefill-0", "num_prompts": 0, "size_bytes": 1 << 40, "num_failed": 0}
    ]
    assert shown["prefix"]["looked_up_tokens"] == 0


def test_watching_shows_the_fleet_as_it_changes(
    address: str,
    fleet: list[list[pb.WorkerStatus]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.cli.status.REFRESH_SECONDS", 0.0)
    printed: list[str] = []

    def stop_after_three(text: str, flush: bool) -> None:
        printed.append(text)
        if len(printed) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("builtins.print", stop_after_three)
    fleet[:] = [[worker("a")], [worker("a"), worker("b")], []]
    status(address, watch=True, as_json=True)
    assert [json.loads(text)["totals"]["workers"] for text in printed] == [1, 2, 0]


@pytest.mark.parametrize("command", ["status", "top"])
def test_watching_through_a_pipe_writes_every_picture(address: str, command: str) -> None:
    watching = [sys.executable, "-m", "weft.cli.main", command, "--scheduler", address]
    watching += ["--watch"] if command == "status" else []
    with subprocess.Popen(watching, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pictures = 0
        for line in process.stdout:
            pictures += "workers" in line
            if pictures == 2:
                break
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert pictures == 2


def test_drain_says_what_it_did_and_whom_it_does_not_know(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    drain(address, "decode-0", undo=False)
    said = capsys.readouterr()
    assert "decode-0 finishes its requests" in said.out
    assert "no other worker is ready for decode:" in said.err, "decode-1 is not"
    drain(address, "decode-0", undo=True)
    said = capsys.readouterr()
    assert "takes requests again" in said.out
    assert said.err == ""
    with pytest.raises(typer.Exit):
        drain(address, "nobody", undo=True)
    assert "weft undrain: no worker 'nobody' is live; `weft status` lists them" in capsys.readouterr().err


@pytest.mark.parametrize("fleet", [[[worker("decode-0"), worker("decode-1")]]])
def test_one_of_several_drains_without_a_warning(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    drain(address, "decode-0", undo=False)
    assert capsys.readouterr().err == ""


def test_role_says_what_it_did_and_why_it_cannot(address: str) -> None:
    asked = CliRunner().invoke(app, ["set-role", "decode-0", "both", "--scheduler", address])
    assert (asked.exit_code, "decode-0 is asked to take the role both" in asked.stdout) == (0, True)
    refused = CliRunner().invoke(app, ["set-role", "decode-0", "prefill", "--scheduler", address])
    assert refused.exit_code == 1
    assert refused.stderr == "weft set-role: decode-0 is the last decode worker of 'm'\n"
    assert CliRunner().invoke(app, ["set-role", "decode-0", "idle", "--scheduler", address]).exit_code == 2


def test_sleep_and_wake_say_what_they_did_and_why_they_cannot(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = CliRunner().invoke(app, ["sleep", "decode-0", "--scheduler", address])
    assert refused.exit_code == 1
    last = "decode-0 is the last decode worker of 'm' that is ready"
    assert refused.stderr == f"weft sleep: {last}; --even-last lets it sleep all the same\n"
    asked = CliRunner().invoke(app, ["sleep", "decode-0", "--even-last", "--scheduler", address])
    assert (asked.exit_code, "`weft wake decode-0` loads its model again" in asked.stdout) == (0, True)
    needless = CliRunner().invoke(app, ["wake", "decode-0", "--scheduler", address])
    assert (needless.exit_code, "decode-0 is not asleep" in needless.stdout) == (0, True)
    monkeypatch.setattr("weft.cli.fleet_commands.REJOIN_SECONDS", 0.0)
    unknown = CliRunner().invoke(app, ["wake", "nobody", "--scheduler", address])
    lists = "unless it is loading its model; `weft status --watch` lists them"
    assert unknown.stderr == f"weft wake: no worker 'nobody' is live, {lists}\n"


def test_a_worker_that_is_just_falling_asleep_is_waited_for(address: str) -> None:
    asked = CliRunner().invoke(app, ["wake", "decode-1", "--scheduler", address])
    assert (asked.exit_code, "decode-1 loads its model again" in asked.stdout) == (0, True)


ASLEEP = worker("decode-0", ready=False)
ASLEEP.report.asleep = True


@pytest.mark.parametrize("fleet", [[[ASLEEP]]])
def test_of_a_sleeping_worker_draining_says_that_it_is(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    drain(address, "decode-0", undo=True)
    assert "decode-0 is asleep: `weft wake decode-0` loads its model" in capsys.readouterr().out
    drain(address, "decode-0", undo=False)
    assert "decode-0 is asleep: once awake it gets no new requests" in capsys.readouterr().out


def test_a_sleeping_worker_is_shown_as_such() -> None:
    sleeping = worker("decode-0", ready=False)
    sleeping.report.asleep = True
    assert "asleep" in shown([sleeping])


def test_a_draining_worker_is_shown_as_such() -> None:
    draining = worker("decode-0", ready=False)
    draining.report.draining = True
    assert "draining" in shown([draining])


LOADING = pb.WorkerArrival(
    worker_id="decode-7",
    role=common_pb2.WORKER_ROLE_DECODE,
    model="weft-nano",
    phase="reading weights",
    done_bytes=43,
    total_bytes=100,
    since_ms=2900,
)


@pytest.mark.parametrize("workers", [[], [worker("decode-0")]])
@pytest.mark.parametrize("width", [80, 200])
def test_a_worker_that_loads_has_a_row_too(workers: list[pb.WorkerStatus], width: int) -> None:
    lines = shown(workers, width, [LOADING]).splitlines()
    row = next(line for line in lines if line.startswith("decode-7"))
    assert "reading weights 43%, 3 s" in row
    assert f"{len(workers)} workers, {len(workers)} ready, 1 loading" in " ".join(lines)
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize(("width", "since_ms"), [(80, 120_000), (60, 2900)])
def test_nothing_is_cut_beside_a_worker_that_loads(width: int, since_ms: int) -> None:
    loading = pb.WorkerArrival()
    loading.CopyFrom(LOADING)
    loading.since_ms = since_ms
    said = shown([worker("decode-0")], width, [loading])
    assert f"reading weights 43%, {since_ms / 1000:.0f} s" in said
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= width


def test_what_is_not_counted_has_no_share_and_json_has_all() -> None:
    arrival = pb.WorkerArrival(role=common_pb2.WORKER_ROLE_DECODE, phase="tuning kernels", since_ms=12_000)
    assert "tuning kernels, 12 s" in shown([], arrivals=[arrival])
    fleet = json.loads(json.dumps(as_dict(pb.ListWorkersResponse(arrivals=[LOADING]))))
    assert fleet["totals"]["loading"] == 1
    (told,) = fleet["arrivals"]
    assert (told["worker_id"], told["role"], told["done_bytes"], told["since_ms"]) == ("decode-7", "decode", 43, 2900)


class AwayInBetween(ListOnly):
    """Answers the first call, and from the fourth one on."""

    def __init__(self) -> None:
        super().__init__([[]])
        self.num_asked = 0

    def ListWorkers(self, request: Any, context: Any) -> Any:
        self.num_asked += 1
        if self.num_asked in (2, 3):
            context.abort(grpc.StatusCode.UNAVAILABLE, "it starts anew")
        return super().ListWorkers(request, context)


def test_a_scheduler_that_is_away_is_told_of_and_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.cli.status.REFRESH_SECONDS", 0.0)
    printed: list[str] = []

    def stop_after_two(text: str, flush: bool) -> None:
        printed.append(text)
        if len(printed) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("builtins.print", stop_after_two)
    with serving(AwayInBetween()) as address:
        status(address, watch=True, as_json=True)
    assert [json.loads(text)["workers"] for text in printed] == [[], []]
    assert capsys.readouterr().err.count("it starts anew") == 2
