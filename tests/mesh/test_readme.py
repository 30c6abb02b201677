"""The README's first requests, as they stand there, against a mesh."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from tests.mesh.conftest import ROOT, Mesh

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def block(start: str) -> str:
    """The code block of the README that begins so."""
    found = [text for _, text in BLOCK.findall((ROOT / "README.md").read_text()) if text.startswith(start)]
    assert len(found) == 1
    return str(found[0])


def run(mesh: Mesh, *command: str) -> str:
    """What a command prints, with the README's port replaced by the mesh's."""
    words = [word.replace("127.0.0.1:8000", f"127.0.0.1:{mesh.port}") for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_first_request_with_curl(mesh: Mesh) -> None:
    answer = json.loads(run(mesh, "bash", "-c", block("curl ")))
    assert answer["choices"][0]["message"]["content"]


def test_the_first_request_with_the_openai_client(mesh: Mesh) -> None:
    assert "Weft" in run(mesh, sys.executable, "-c", block("from openai"))
