"""The TypeScript clients, by node's own test runner; what they left on the way is cancelled down to the worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.scene import Scene

NODE = Path(__file__).parent / "node"


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("checks", "num_left"), [("openai", 2), ("ai-sdk", 1)])
async def test_typescript_clients(front: Scene, checks: str, num_left: int) -> None:
    await front.door.run("node", "--test", str(NODE / f"{checks}.checks.mjs"))
    await front.check_cancelled(num_left)
