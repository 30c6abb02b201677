"""A chunk built from preserialized parts equals one that is serialized as a whole."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_services.gateway.dialects.answers import GRAIN_BYTES, with_obfuscation
from weft_services.gateway.dialects.openai_encoders import Envelope


@pytest.mark.parametrize("include_usage", [True, False])
@given(text=st.text(), index=st.integers(0, 15))
def test_a_text_frame_is_the_frame_of_its_choice(include_usage: bool, text: str, index: int) -> None:
    asked = SimpleNamespace(
        model="näme", include_usage=include_usage, include_obfuscation=False, continuous_usage=False
    )
    prepared: Any = SimpleNamespace(generation=asked, num_prompt_tokens=1)
    envelope = Envelope("chatcmpl", ("chat.completion", "chat.completion.chunk"), prepared, "fp_1")
    choice = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    frame = envelope.frame(choice)
    assert envelope.text_frame(index, b"content", text) == frame
    hidden = with_obfuscation(frame)
    assert len(hidden) % GRAIN_BYTES == 0
    fields = json.loads(hidden.removeprefix(b"data: "))
    assert len(fields.pop("obfuscation")) < GRAIN_BYTES
    assert fields == json.loads(frame.removeprefix(b"data: "))
