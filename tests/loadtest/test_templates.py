"""The check of chat templates: what it calls equal, lost, refused and misread."""

from __future__ import annotations

import pytest
from loadtest.templates.calling import Reading, judge
from loadtest.templates.conversations import CONVERSATIONS
from loadtest.templates.rendering import SPECIAL, Outcome, compare

from tests.services.gateway.test_templates import TEMPLATES
from tests.services.gateway.test_tool_formats import EACH, OBJECTS
from weft_services.gateway.text.chat_template import ChatTemplate

WHOLE = f"{EACH}{OBJECTS}{{% endfor %}}<end>{{% endfor %}}{{% if add_generation_prompt %}}assistant: {{% endif %}}"


@pytest.mark.parametrize(
    ("source", "name", "outcome"),
    [
        (WHOLE, "turns", Outcome.SAME),
        (WHOLE, "developer", Outcome.SYSTEM),
        (WHOLE.replace(" or ''", ""), "call", Outcome.SAME_EMPTY),
        ("{{ raise_exception('no') }}", "turns", Outcome.REFUSED),
        ("{{ messages[0].content + messages[-1].content }}", "system twice", Outcome.KEPT),
        ("{{ messages[1].content['x'].y.z }}", "question", Outcome.REFUSED),
        ("{{ 7 | attr('real') }}", "question", Outcome.SAME),
    ],
)
def test_compare_names_the_outcome(source: str, name: str, outcome: Outcome) -> None:
    found = compare(source, ChatTemplate(source, SPECIAL), CONVERSATIONS[name], SPECIAL)
    assert found.outcome is outcome, found


@pytest.mark.parametrize(
    ("source", "reading", "tool_format"),
    [
        (TEMPLATES["qwen3-0.6b"], Reading.READ, "hermes"),
        (TEMPLATES["ministral-3-14b-reasoning-2512"], Reading.READ, "mistral-args"),
        (TEMPLATES["llama-2-chat"], Reading.NONE, "none"),
        (WHOLE, Reading.READ, "hermes"),
        (WHOLE.replace("tool_call>", "other>"), Reading.UNKNOWN, "none"),
        (WHOLE.replace("{% set f", "no {% set f"), Reading.WRONG, "hermes"),
        ("{% for m in messages", Reading.UNLOADED, "none"),
    ],
)
def test_judge_names_what_is_read(source: str, reading: Reading, tool_format: str) -> None:
    assert (judge(source).reading, judge(source).tool_format) == (reading, tool_format)


def test_conversations_differ() -> None:
    assert len({str(body) for body in CONVERSATIONS.values()}) == len(CONVERSATIONS) == 49
