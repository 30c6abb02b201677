"""Runs the commands of README and docs as written; `accounts.py` lists those that run elsewhere or not at all."""

from __future__ import annotations

import ast
import importlib
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from tests.docs.accounts import ALONE, BUNDLES, GGUF, HUB, MAKE, MODULES, ON_A_MESH, OTHERS, UP
from tests.docs.pages import PAGES, ROOT, commands, distinct, named
from weft.cli import plan
from weft.cli.doctor import machine
from weft.cli.main import app
from weft_bundle.__main__ import app as bundle_program

MODEL = ROOT / "models" / "weft-nano"
# Commands that run without arguments too, and their exit statuses: doctor may find a problem on this machine.
ON_THEIR_OWN = {"doctor": {0, 1}}
runner = CliRunner()


def filled_in(words: list[str]) -> list[str]:
    """Replace the placeholders for a model, its draft head and a name."""
    chosen = {"DIR": str(MODEL), "MODEL": str(MODEL), "HEAD": str(MODEL / "draft"), "NAME": "bob"}
    return [chosen.get(word, word) for word in words]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the commands; no mesh is recorded there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def run_all(program: Typer, extra: dict[str, list[str]]) -> None:
    """Run every use of these commands that has arguments."""
    ran = set()
    for name, *rest in distinct("weft", *extra):
        if rest or name in ON_THEIR_OWN:
            result = runner.invoke(program, [name, *filled_in(rest), *extra[name]])
            assert result.exit_code in ON_THEIR_OWN.get(name, {0}), f"weft {name} {shlex.join(rest)}: {result.output}"
            ran.add(name)
    assert ran == set(extra)


def test_commands_that_need_no_mesh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "mooncake_trouble", lambda: "")  # loading takes seconds
    monkeypatch.setattr(plan, "fetch_config", lambda name: MODEL)  # tests/weft/test_hub.py fetches from a server
    run_all(app, ALONE)


def test_commands_for_bundles(folder: Path) -> None:
    run_all(bundle_program, BUNDLES)


def test_every_weft_command_is_run_somewhere() -> None:
    for page, words in named("weft"):
        if words[0] != "up":
            assert words[0] in {*ON_A_MESH, *ALONE, *BUNDLES, *GGUF, *HUB}, f"{page}: weft {words[0]}"
        options = [word for word in words if words[0] == "up" and word.startswith("--")]
        assert set(options) <= set(UP), f"{page}: weft {shlex.join(words)}"


@pytest.mark.parametrize("place", sorted({*UP.values(), *GGUF.values(), *HUB.values()}))
def test_named_tests_and_fixtures_exist(place: str) -> None:
    path, _, name = place.partition("::")
    module = ast.parse((ROOT / "tests" / path).read_text())
    assert name in {node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_other_command_is_accounted_for() -> None:
    for page, words in named("make"):
        assert words[0] in MAKE, f"{page}: make {words[0]}"
    for page, words in named("python"):
        accounts = [module for module in MODULES if words[1] == module or words[1].startswith(f"{module}.")]
        assert words[0] == "-m", f"{page}: {words}"
        assert accounts, f"{page}: python -m {words[1]}"
    programs = {words[0] for page in PAGES for words in commands(page) if (ROOT / words[0]).is_file()}
    scripts = {program for program in programs if program.endswith(".sh")}
    assert scripts <= set(OTHERS)


def test_commands_append_to_env_files() -> None:
    """Overwriting .env would lose an installation's other settings."""
    for page in PAGES:
        assert not [words for words in commands(page) if (">", ".env") in pairwise(words)], page


BENCHMARKS = sorted({words[1] for _, words in named("python") if words[1].startswith("loadtest")})


@pytest.mark.parametrize("module", BENCHMARKS)
def test_every_benchmark_can_be_imported(module: str) -> None:
    importlib.import_module(f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module)
