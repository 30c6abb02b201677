"""Messages between ranks, and followers that cannot load."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.weft.tiny_llama import Tiny
from weft.engine.config import EngineConfig
from weft.errors import ConfigError, EngineFailed, PeerLost
from weft.kv.layer_groups import AttentionSpan
from weft.model.sharding import BadPlan, Layout
from weft.worker.config import WorkerConfig
from weft.worker.follower import FollowerOrder, read_limits, write_limits
from weft.worker.group import start_group
from weft.worker.group_link import MAX_MESSAGE_BYTES, MessageSocket
from weft.worker.group_startup import check_group, rank_cpus

NEEDED: dict[str, Any] = {"worker_id": "decode-0", "scheduler_addr": "h:1", "weights_addr": "h:2", "model_name": "m"}


Pair = tuple[MessageSocket, MessageSocket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with left, right:
        yield MessageSocket(left), MessageSocket(right)


def send_all(link: MessageSocket, messages: list[bytes]) -> None:
    for each in messages:
        link.send(each)


def test_messages_arrive_whole_and_in_order(pair: Pair) -> None:
    left, right = pair
    sent = [b"", b"x", bytes(range(256)) * 4000]
    sender = threading.Thread(target=send_all, args=(left, sent))
    sender.start()
    assert [right.receive() for _ in sent] == sent
    sender.join()
    left.stream.close()
    assert right.receive() is None


@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_a_message_that_is_cut_is_an_error(count: int, pair: Pair) -> None:
    left, right = pair
    left.stream.sendall((100).to_bytes(4, "little") + b"abcd"[: count - 4] if count > 4 else b"\x64\0\0\0"[:count])
    left.stream.close()
    with pytest.raises(PeerLost, match="inside a message"):
        right.receive()


def test_a_message_that_is_too_long_is_an_error(pair: Pair) -> None:
    left, right = pair
    left.stream.sendall((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(PeerLost, match="announced a message of"):
        right.receive()


def test_sending_to_a_rank_that_does_not_read_ends(pair: Pair) -> None:
    left, _ = pair
    left.stream.settimeout(0.2)
    with pytest.raises(PeerLost, match="cannot send"):
        left.send(bytes(50 << 20))


def test_limits_come_back() -> None:
    config = EngineConfig(
        num_blocks=9, block_tokens=16, vocab_size=7, max_context_tokens=50, spans=(AttentionSpan(), AttentionSpan(8))
    )
    assert read_limits(write_limits(config)) == config


def order_of(tiny: Tiny, place: int) -> FollowerOrder:
    """An order for an image that does not exist."""
    config_json = (tiny.directory / "config.json").read_text()
    return FollowerOrder(
        worker_id="w",
        layout=(2, 1, 1),
        place=place,
        image="weft-weights-gone",
        image_bytes=9,
        config_json=config_json,
        dtype="float32",
        stored_dtype="float32",
        is_resident=False,
        threads=1,
        cpus="",
        niceness=0,
    )


def test_a_follower_that_cannot_load_is_named(grouped: Tiny) -> None:
    group = start_group(Layout(2), lambda place: order_of(grouped, place), time.monotonic)
    try:
        with pytest.raises(EngineFailed, match=r"rank 1 ended while it loaded \(status 1\)"):
            group.await_loaded()
    finally:
        group.close()


def test_cores_are_dealt_out_in_equal_parts() -> None:
    config = WorkerConfig(**NEEDED, tp=2, cpus="0-4")
    assert [rank_cpus(config, place) for place in range(2)] == ["0,1", "2,3"]
    assert rank_cpus(WorkerConfig(**NEEDED, tp=4, cpus="0,1"), 3) == ""
    assert rank_cpus(WorkerConfig(**NEEDED, cpus="0-4"), 0) == "0-4"


def test_layouts_that_do_not_fit_are_refused(grouped: Tiny) -> None:
    config = WorkerConfig(**NEEDED, tp=2)
    check_group(config, "cpu", grouped.config)
    with pytest.raises(ConfigError, match="WEFT_TP=2: several ranks run on CPUs only"):
        check_group(config, "cuda", grouped.config)
    with pytest.raises(BadPlan, match="does not divide 3 heads"):
        check_group(config, "cpu", replace(grouped.config, num_heads=3))
    wrongs: list[dict[str, Any]] = [{"ep": 2}, {"tp": 2, "draft": "mtp"}, {"tp": 2, "draft": "/some/head"}]
    for wrong in wrongs:
        with pytest.raises((ConfigError, ValueError)):
            WorkerConfig(**NEEDED, **wrong)
