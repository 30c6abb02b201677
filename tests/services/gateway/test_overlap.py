"""How much of a text may be the beginning of a stop string."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft_services.gateway.text.parts import overlap

FEW = st.text("ab", max_size=9)


@given(FEW, st.text("ab", min_size=1, max_size=6))
def test_the_longest_end_that_begins_it_and_never_all_of_it(text: str, stop: str) -> None:
    lengths = range(min(len(stop) - 1, len(text)) + 1)
    assert overlap(text, stop) == max(length for length in lengths if text.endswith(stop[:length]))
