"""Copied drafts: what they yield on edited text, how they follow, and how they index long prompts."""

from __future__ import annotations

from random import Random

import pytest
from loadtest.processes import ROOT
from loadtest.speculation.copies import replay
from tokenizers import Tokenizer

from weft.engine.drafting.copying import NO_MATCH, CopyIndex, PredictionReader, TextMatch


@pytest.fixture(scope="module")
def license_tokens() -> tuple[list[int], list[int]]:
    """The license before and after edits: a word replaced everywhere, a section removed, a paragraph inserted."""
    tokenizer = Tokenizer.from_file(str(ROOT / "models" / "weft-nano" / "tokenizer.json"))
    old = (ROOT / "LICENSE").read_text()
    new = old.replace("Licensor", "Author")
    new = new[: new.index("   6. Trademarks")] + new[new.index("   7. Disclaimer") :]
    place = new.index("   8. Limitation")
    new = new[:place] + "   No paragraph with these words stood in the text before.\n\n" + new[place:]
    return tokenizer.encode(old).ids, tokenizer.encode(new).ids


def test_copies_yield_tokens_on_edited_text(license_tokens: tuple[list[int], list[int]]) -> None:
    old, new = license_tokens
    assert len(new) / replay(old, new).steps > 8.5
    assert len(new) / replay([], new, old).steps > 7.5
    assert len(new) / replay(old, new, old).steps > 8.5
    assert replay(old, new).accepted / replay(old, new).verified > 0.8


def test_prediction_is_read_again_after_a_difference() -> None:
    random = Random(1)
    prediction = [random.randrange(2000) for _ in range(400)]
    answer = [*prediction[:100], 7, 7, *prediction[101:200], *prediction[240:]]
    text = [1, 2]
    reader = PredictionReader(prediction, text, len(text))
    assert reader.copy(reader.find())[:4] == prediction[:4]
    places = []
    for token in answer:
        text.append(token)
        places.append(reader.find().place)
    assert places[:100] == list(range(1, 101))
    assert set(places[100:104]) == {0}
    assert places[104:201] == list(range(104, 201)), "three equal tokens after the replaced ones"
    assert places[203:] == list(range(243, 401)), "three equal tokens after the removed ones"


@pytest.mark.parametrize("max_indexed", [10_000, 97])
def test_index_finds_the_longest_match(max_indexed: int) -> None:
    random = Random(2)
    text = [random.randrange(30) for _ in range(3000)]
    text[1000:1006] = [40, 41, 42, 43, 44, 45]
    text[2000:2006] = [50, 41, 42, 43, 44, 46]
    text += [40, 41, 42, 43]
    index = CopyIndex(text, 4000)
    found = [index.find(max_indexed) for _ in range(3004 // max_indexed + 1)]
    assert found[:-1] == [NO_MATCH] * (len(found) - 1), "an index with a part of the text finds nothing"
    assert found[-1] == TextMatch(1004, 4)
    assert index.copy(found[-1]) == text[1004:1012]


def test_copy_repeats_the_end_of_the_text() -> None:
    text = [1, 2, 3, 4, 5, 4, 5, 4, 5]
    index = CopyIndex(text, 100)
    match = index.find(100)
    assert match == TextMatch(7, 4)
    assert index.copy(match) == [4, 5] * 4


def test_index_agrees_with_a_search_of_the_whole_text() -> None:
    """With slots enough, a match is the longest of the last two places, the followed one, or that of two tokens."""
    random = Random(3)
    text: list[int] = []
    index = CopyIndex(text, 100_000)
    for _ in range(2000):
        text.append(random.randrange(8))
        match = index.find(1000)
        tail = text[-3:]
        places = [end for end in range(3, len(text)) if text[end - 3 : end] == tail]
        pairs = [end for end in range(3, len(text)) if text[end - 2 : end] == tail[-2:]]
        if len(text) < 4 or not pairs:
            assert match == NO_MATCH
        elif not places:
            assert match == TextMatch(pairs[-1], 2)
        else:
            assert match.place in places
            assert match.length >= max(_common(text, place) for place in places[-2:])


def _common(text: list[int], place: int) -> int:
    return next((i for i in range(min(16, place)) if text[place - 1 - i] != text[-1 - i]), min(16, place))
