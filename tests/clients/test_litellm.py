"""LiteLLM has an environment of its own: it wants an older openai."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.scene import Scene

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv-clients" / "bin" / "python"


@pytest.mark.timeout(180)
async def test_litellm(front: Scene) -> None:
    checks = str(HERE / "litellm_checks.py")
    await front.door.run(
        str(PYTHON), "-m", "pytest", "-q", "--noconftest", "-c", "/dev/null", "--rootdir", str(HERE), checks,
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )  # fmt: skip
    await front.check_cancelled(1)
