"""What is left to be looked at when a strike fails: its requests, the workers, and what the mesh said meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from tests.chaos.stream import Stream
from tests.mesh.conftest import Mesh

MAX_LINES = 150


@contextmanager
def witnessed(mesh: Mesh) -> Iterator[dict[str, Stream]]:
    """An error that ends the block tells of the streams that were put into the dict, by what they are called there."""
    streams: dict[str, Stream] = {}
    num_said = len(mesh.log())
    try:
        yield streams
    except Exception as error:
        for name, stream in streams.items():
            error.add_note(f"{name}: {stream.told()}")
        for line in _workers(mesh):
            error.add_note(line)
        lines = mesh.log()[num_said:].splitlines()
        error.add_note("\n".join([f"the mesh said meanwhile, {len(lines)} lines:", *lines[-MAX_LINES:]]))
        raise


def _workers(mesh: Mesh) -> list[str]:
    try:
        statuses = mesh.workers()
    except grpc.RpcError as error:
        return [f"the scheduler does not answer: {error.code()}"]
    told = []
    for name, status in sorted(statuses.items()):
        report, hello = status.report, status.hello
        blocks = (report.free_blocks, report.cached_blocks, report.active_blocks, report.quarantined_blocks)
        told.append(
            f"{name}: boot {hello.worker.boot_id[:8]}, ready {report.ready}, said {status.report_age_ms} ms ago, "
            f"running {report.num_running}, waiting {report.num_waiting}, booked {status.booked_requests}, "
            f"blocks free, cached, active, in quarantine {blocks} of {hello.num_blocks}"
        )
    return told
