"""Two nodes with a network between them: the second loads over it and reads a sample of its own disk, and goes on from
that when the first dies or the cable is pulled. Network namespaces and a slow link; needs root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.services.weights.service import MODEL, PATIENCE_SECONDS, line_with
from tests.weft.weights.checkpoints import CONFIG, random_tensors, safetensors_bytes
from weft.weights import image as image_module
from weft.weights.checkpoint import read_checkpoint
from weft.weights.image import image_name
from weft.weights.load import image_layout
from weft.weights.safetensors import read_header
from weft.weights.storage import SECTOR_BYTES

PORT = "9100"
LINK = "weft0"
CODE_BYTES = 64 << 10  # pages of its libraries, if the page cache has let go of some; a run of weights is 2 MiB


@dataclass(frozen=True, slots=True)
class Node:
    """A network namespace, and a checkpoint on this node's disk."""

    namespace: str
    address: str
    directory: Path

    def run(self, *command: str) -> str:
        """In the node's network."""
        whole = ("ip", "netns", "exec", self.namespace, *command)
        return subprocess.run(whole, check=True, capture_output=True, text=True, timeout=PATIENCE_SECONDS).stdout

    @contextmanager
    def serving(self, weights_from: str = "") -> Iterator[subprocess.Popen[str]]:
        """The weights service of this node, past the point where it listens."""
        settings = {
            "WEFT_MODEL": str(self.directory), "WEFT_MODEL_NAME": MODEL, "WEFT_THREADS": "1", "WEFT_HOST": self.address,
            "WEFT_PORT": PORT, "WEFT_WEIGHTS_FROM": weights_from,
        }  # fmt: skip
        command = ("ip", "netns", "exec", self.namespace, sys.executable, "-m", "weft_services.weights")
        with subprocess.Popen(command, env={**os.environ, **settings}, stderr=subprocess.PIPE, text=True) as process:
            try:
                line_with(process, "listening at=")
                yield process
            finally:
                process.terminate()
                process.wait(PATIENCE_SECONDS)

    def received_bytes(self) -> int:
        """Over the link."""
        return int(self.run("cat", f"/sys/class/net/{LINK}/statistics/rx_bytes"))

    @property
    def image(self) -> Path:
        return image_module.SHARED_MEMORY / image_name(read_checkpoint(self.directory))

    @property
    def num_bytes(self) -> int:
        """Of weights."""
        return read_checkpoint(self.directory).total_bytes


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    """The same checkpoint of 5 MB on two nodes, 40 Mbit/s between them."""
    tag = f"weft-{os.getpid()}"
    one, two = Node(f"{tag}-1", "10.231.7.1", tmp_path / "one"), Node(f"{tag}-2", "10.231.7.2", tmp_path / "two")
    one.directory.mkdir()
    (one.directory / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 2000, "hidden_size": 256}))
    (one.directory / "model.safetensors").write_bytes(safetensors_bytes(random_tensors(one.directory)))
    shutil.copytree(one.directory, two.directory)
    os.sync()
    try:
        try:
            _connect(one, two)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield one, two
    finally:
        for node in (one, two):
            subprocess.run(("ip", "netns", "del", node.namespace), capture_output=True, check=False)
    for path in image_module.SHARED_MEMORY.glob(f"weft-weights-{read_checkpoint(one.directory).directory_id}-*"):
        path.unlink()  # a killed node's, kept for its successor
    assert not two.image.exists()


def _connect(one: Node, two: Node) -> None:
    for node in (one, two):
        _ip("netns", "add", node.namespace)
    _ip("link", "add", LINK, "netns", one.namespace, "type", "veth", "peer", "name", LINK, "netns", two.namespace)
    for node in (one, two):
        _ip("-n", node.namespace, "addr", "add", f"{node.address}/30", "dev", LINK)
        for link in (LINK, "lo"):
            _ip("-n", node.namespace, "link", "set", link, "up")
    one.run("tc", "qdisc", "add", "dev", LINK, "root", "tbf", "rate", "40mbit", "burst", "32kbit", "latency", "400ms")


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True, timeout=PATIENCE_SECONDS)


def disk_bytes(process: subprocess.Popen[str]) -> int:
    """What storage has read for a process so far; `ip netns exec` becomes what it runs."""
    counters = Path(f"/proc/{process.pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in counters if line.startswith("read_bytes:"))


def held(node: Node) -> tuple[str, dict[str, bytes]]:
    """The hash and the tensors of a node's image, as any reader of safetensors files sees them."""
    content, header = node.image.read_bytes(), read_header(node.image)
    tensors = {each.name: content[each.offset : each.offset + each.size_bytes] for each in header.tensors}
    return header.metadata["weights_hash"], tensors


def on_disk(node: Node) -> dict[str, bytes]:
    content = (node.directory / "model.safetensors").read_bytes()
    tensors = read_header(node.directory / "model.safetensors").tensors
    return {each.name: content[each.offset : each.offset + each.size_bytes] for each in tensors}


def test_the_second_node_loads_over_the_network_and_samples_its_disk(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    with one.serving() as first:
        line_with(first, "weights from files")
        assert disk_bytes(first) >= one.num_bytes
        with two.serving(f"{one.address}:{PORT}") as second:
            before = disk_bytes(second)
            assert f"weights from {one.address}:{PORT} " in line_with(second, "weights from")
            samples = image_layout(read_checkpoint(two.directory)).samples()
            assert disk_bytes(second) - before < CODE_BYTES + len(samples) * 2 * SECTOR_BYTES < two.num_bytes // 10
            assert two.received_bytes() > two.num_bytes
            assert held(two) == held(one)
            assert held(two)[1] == on_disk(one)


@pytest.mark.parametrize("end", ["killed", "unplugged"])
def test_when_the_first_node_is_lost_half_way_the_rest_comes_from_disk(nodes: tuple[Node, Node], end: str) -> None:
    one, two = nodes
    with one.serving() as first:
        line_with(first, "weights from files")
        with two.serving(f"{one.address}:{PORT}") as second:
            before, deadline = disk_bytes(second), time.monotonic() + PATIENCE_SECONDS
            while two.received_bytes() < two.num_bytes // 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            if end == "killed":
                first.kill()
            else:
                _ip("-n", one.namespace, "link", "set", LINK, "down")
            assert "reading the rest of the weights from files" in line_with(second, "the rest")
            assert "weights from files" in line_with(second, "weights from files")
            assert 0 < disk_bytes(second) - before < two.num_bytes
            assert held(two)[1] == on_disk(two)
