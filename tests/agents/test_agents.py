"""Claude Code, Codex and OpenCode list a folder's files: three APIs of the gateway, each with calls that stream."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from uuid import uuid4

import pytest

from tests.agents.scripted import ScriptedModel

DEADLINE_SECONDS = 50
TASK = "list the files in this folder"


async def run(command: list[str], folder: Path, home: Path, variables: dict[str, str]) -> str:
    """What the agent printed. Its home is empty, and nothing but the gateway is told to it."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TERM": "dumb",
        "no_proxy": "127.0.0.1",
        **variables,
    }
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    assert process.returncode == 0, (out.decode()[-2000:], err.decode()[-2000:])
    return out.decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the agent works: one file, whose name no model could guess."""
    path = tmp_path / "work"
    path.mkdir()
    (path / f"marker-{uuid4().hex}.txt").write_text("here")
    return path


@pytest.fixture
def agents(request: pytest.FixtureRequest) -> Path:
    """Where npm has put their commands."""
    return Path(request.config.getoption("--agents")).resolve() / "node_modules/.bin"


def assert_listed(folder: Path, printed: str, model: ScriptedModel) -> None:
    """The name was seen by the model as a tool's result, and by the user as its answer."""
    (marker,) = folder.iterdir()
    assert any("<tool_response>" in prompt and marker.name in prompt for prompt in model.prompts)
    assert f"The folder holds {marker.name}." in printed


@pytest.mark.timeout(60)
async def test_claude_code_lists_the_files(model: ScriptedModel, agents: Path, folder: Path, tmp_path: Path) -> None:
    variables = {
        "ANTHROPIC_BASE_URL": model.url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": "nano",
        "ANTHROPIC_SMALL_FAST_MODEL": "nano",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    command = [str(agents / "claude"), "-p", TASK, "--allowedTools", "Bash"]
    assert_listed(folder, await run(command, folder, tmp_path, variables), model)


@pytest.mark.timeout(60)
async def test_codex_lists_the_files(model: ScriptedModel, agents: Path, folder: Path, tmp_path: Path) -> None:
    home = tmp_path / ".codex"
    home.mkdir()
    (home / "config.toml").write_text(
        f"""
        model = "nano"
        model_provider = "weft"
        check_for_update_on_startup = false
        [analytics]
        enabled = false
        [model_providers.weft]
        name = "Weft"
        base_url = "{model.url}/v1"
        wire_api = "responses"
        """
    )
    sandbox = ["--sandbox", "danger-full-access", "--skip-git-repo-check"]
    printed = await run([str(agents / "codex"), "exec", *sandbox, TASK], folder, tmp_path, {"CODEX_HOME": str(home)})
    assert_listed(folder, printed, model)


@pytest.mark.timeout(60)
async def test_opencode_lists_the_files(model: ScriptedModel, agents: Path, folder: Path, tmp_path: Path) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Weft",
        "options": {"baseURL": f"{model.url}/v1", "apiKey": "none"},
        "models": {"nano": {"name": "nano", "tool_call": True, "limit": {"context": 200_000, "output": 4096}}},
    }
    settings = {
        "provider": {"weft": provider},
        "model": "weft/nano",
        "small_model": "weft/nano",
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
    }
    path = tmp_path / "opencode.json"
    path.write_text(json.dumps(settings))
    variables = {"OPENCODE_CONFIG": str(path), "OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    printed = await run([str(agents / "opencode"), "run", TASK], folder, tmp_path, variables)
    assert_listed(folder, printed, model)
