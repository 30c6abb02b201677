"""Schemathesis by OpenAI's own document, cut down to what is served; `openapi/exceptions.py` says what is let pass.

`make client-test ARGS='-k openapi --examples 2000'` tries more, for as many minutes as that takes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.openapi.exceptions import IGNORED, NARROWED, REFUSED, SERVED_VARIANTS, UNSERVED_PROPERTIES
from tests.clients.scene import Door, Scene

HERE = Path(__file__).parent / "openapi"
SCHEMATHESIS = HERE.parents[2] / ".venv-clients" / "bin" / "schemathesis"
NUM_EXAMPLES = 25


async def schemathesis(door: Door, *how_much: str, **variables: str) -> None:
    """All that it has to say against a gateway."""
    config = ["--config-file", str(HERE / "schemathesis.toml")]
    await door.run(
        str(SCHEMATHESIS), "--no-color", *config, "run", str(HERE / "openai.json"), *how_much,
        PYTHONPATH=str(HERE.parents[2]), **variables,
    )  # fmt: skip


@pytest.mark.timeout(3600)
async def test_the_gateway_keeps_to_openais_document(front: Scene, request: pytest.FixtureRequest) -> None:
    asked = request.config.getoption("--examples")
    how_much = ["--max-examples", str(asked)] if asked else ["--max-examples", str(NUM_EXAMPLES), "--seed", "1"]
    await schemathesis(front.door, *how_much)


def test_every_exception_has_a_reason() -> None:
    reasons = [
        *(reason for properties in UNSERVED_PROPERTIES.values() for reason in properties.values()),
        *(reason for _, reason in SERVED_VARIANTS.values()),
        *(reason for *_, reason in NARROWED),
        *(each.reason for each in REFUSED),
        *IGNORED.values(),
    ]
    assert all(len(reason.split()) > 1 for reason in reasons)
