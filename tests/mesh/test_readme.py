"""The first requests of README and docs, as they stand there, against a mesh."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from typer.testing import CliRunner

from tests.docs.accounts import ON_A_MESH
from tests.docs.pages import distinct
from tests.mesh.conftest import ROOT, Mesh
from weft.cli.main import app
from weft.cli.mesh_registry import runtime_folder

GRPCURL = re.compile(r"^grpcurl -plaintext -d '(.*)' \S+ (\S+)$", re.M)
FIELD = re.compile(r'"(\w+)": ?')
runner = CliRunner()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def block(start: str, page: str = "README.md") -> str:
    """The code block of the page that begins so."""
    found = [text for _, text in BLOCK.findall((ROOT / page).read_text()) if text.startswith(start)]
    assert len(found) == 1
    return str(found[0])


def run(mesh: Mesh, *command: str) -> str:
    """What a command prints, with the pages' ports replaced by the mesh's."""
    http, rpc = f"127.0.0.1:{mesh.port}", f"127.0.0.1:{mesh.grpc_port}"
    words = [word.replace("127.0.0.1:8000", http).replace("127.0.0.1:9000", rpc) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_first_request_with_curl(mesh: Mesh) -> None:
    answer = json.loads(run(mesh, "bash", "-c", block("curl ")))
    assert answer["choices"][0]["message"]["content"]


def test_requests_of_the_api_page_have_the_fields_of_their_answers(mesh: Mesh) -> None:
    blocks = BLOCK.findall((ROOT / "docs/reference/api.md").read_text())
    pairs = [(text, shown) for (_, text), (_, shown) in pairwise(blocks) if text.startswith("curl ")]
    assert len(pairs) == 5
    for request, shown in pairs:
        answer = run(mesh, "bash", "-c", request)
        fields = set(FIELD.findall(shown))
        assert len(fields) > 5, request
        assert not fields - set(FIELD.findall(answer)), answer


def test_the_first_request_with_the_openai_client(mesh: Mesh) -> None:
    assert "Weft" in run(mesh, sys.executable, "-c", block("from openai"))


def test_the_example_over_grpc(mesh: Mesh) -> None:
    assert "Weft" in run(mesh, sys.executable, "-c", (ROOT / "examples/grpc_chat.py").read_text())


def test_the_commands_for_a_running_mesh(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weft").mkdir()
    (note,) = runtime_folder().glob(f"up-{mesh.port}-*.json")
    (tmp_path / "weft" / note.name).write_text(note.read_text())  # of this one, whatever else runs here
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    ran = set()
    for name, *rest in distinct("weft", *ON_A_MESH):
        if not rest and name in ("drain", "undrain", "set-role", "sleep", "wake"):
            continue  # a mention
        result = runner.invoke(app, [name, *rest, *ON_A_MESH[name]], input="Who are you?\n")
        if name in ("set-role", "sleep"):
            assert "last" in result.output, "the only worker of its role keeps it; test_roles and test_sleep have more"
        else:
            assert result.exit_code == 0, f"weft {name} {shlex.join(rest)}: {result.output}"
        ran.add(name)
    assert ran == set(ON_A_MESH)
    mesh.wait_idle()


def test_the_calls_with_grpcurl(mesh: Mesh) -> None:
    """By what reflection says of the service, as grpcurl does it."""
    with grpc.insecure_channel(f"127.0.0.1:{mesh.grpc_port}") as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        assert "weft_mesh.v1.InferenceService" in database.get_services()
        for data, method in GRPCURL.findall(block("grpcurl", "docs/reference/api.md")):
            service, _, name = method.partition("/")
            found = pool.FindServiceByName(service).FindMethodByName(name)
            asks = GetMessageClass(found.input_type)
            request = json_format.Parse(data, asks())
            reads = GetMessageClass(found.output_type).FromString
            call = channel.unary_stream(
                f"/{method}", request_serializer=asks.SerializeToString, response_deserializer=reads
            )
            assert [str(answer) for answer in call(request, timeout=30) if str(answer)], method
