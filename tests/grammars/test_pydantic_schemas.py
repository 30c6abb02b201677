"""Schemas of ordinary pydantic classes: their answers fit the schema, and the class takes them."""

from __future__ import annotations

import re
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib._pydantic import to_strict_json_schema
from pydantic import AnyUrl, BaseModel, ConfigDict, Field, Json, SecretStr, TypeAdapter
from tokenizers import Tokenizer

from tests.grammars.test_schema_forms import answers, grammars, tokenizer
from weft.grammar import Grammars
from weft_services.gateway.grammar.schema_rewrite import without_look_ahead

__all__ = ["grammars", "tokenizer"]

Short = Annotated[str, Field(max_length=5)]
Few = Field(max_length=2)


class Colour(Enum):
    """Of texts."""

    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    """Of numbers."""

    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    """Its tag has a default, and is not required by its schema."""

    kind: Literal["cat"] = "cat"
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(BaseModel):
    """Its tag is required."""

    kind: Literal["dog", "wolf"]
    name: Short


class Fish(BaseModel):
    """Its tag is of an enumeration."""

    kind: Literal["fish"] = "fish"
    colour: Colour


class Node(BaseModel):
    """Refers to itself."""

    size: Level
    children: Annotated[list[Node], Few]
    parent: Node | None = None


class Closed(BaseModel):
    """Takes no more properties than it has."""

    model_config = ConfigDict(extra="forbid")

    flag: bool = False


class Open(BaseModel):
    """Takes others too."""

    model_config = ConfigDict(extra="allow")

    flag: bool


Pet = Annotated[Cat | Dog | Fish, Field(discriminator="kind")]
CLASSES: list[Any] = [
    *(SecretStr, Path, bytes, Decimal, datetime, date, time, timedelta, UUID, IPv4Address, IPv6Address, AnyUrl),
    *(Colour, Level, Literal["a", 1], int | None, type(None), Closed, Open, Node, Pet),
    *(tuple[int, Short], tuple[Colour, ...], Json),
    Annotated[list[Pet], Few],
    Annotated[int, Field(multiple_of=5, ge=0, lt=100)],
    Annotated[Decimal, Field(ge=0, max_digits=6, decimal_places=2)],
    Annotated[dict[str, int], Few],
    Annotated[dict[int, Pet], Few],
    Annotated[dict[Colour, int], Few],
    Annotated[dict[Literal["a"], list[Colour]], Few],
    Annotated[dict[UUID, bool], Few],
    Annotated[dict[Short, bool], Few],
    Annotated[dict[Path, bool], Few],
    Annotated[dict[Short, Colour], Few],
]
# where the answer fits the schema and the class still asks for more than the schema says
MORE = (SecretStr, time, datetime, AnyUrl, timedelta, date, IPv6Address, Decimal, Json)


@pytest.mark.parametrize("kind", CLASSES, ids=str)
def test_answers_fit_classes(kind: Any, grammars: Grammars, tokenizer: Tokenizer) -> None:
    adapter = TypeAdapter(kind)
    schema = adapter.json_schema()
    for answer in answers(schema, grammars, tokenizer):
        jsonschema.validate(answer, schema)
        if kind not in MORE and "dict[int" not in str(kind) and "Decimal" not in str(kind):
            adapter.validate_python(answer)


@pytest.mark.parametrize("kind", [Node, Closed, Cat, Dog], ids=lambda kind: str(kind.__name__))
def test_answers_fit_strict_classes(kind: Any, grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = to_strict_json_schema(kind)
    for answer in answers(schema, grammars, tokenizer):
        jsonschema.validate(answer, schema)
        kind.model_validate(answer)


# as pydantic 2.12 and those before it write them, for no bound, places, digits, and digits with places
EXACT = [r"\d*\.?\d*$", r"\d*\.?\d{0,2}0*$", r"\d*\.?\d{0,0}0*$", r"\d*\.?\d{0,1}0*$"]
NARROWER = [
    r"(?:\d{0,5}|(?=[\d.]{1,6}0*$)\d*\.\d*0*$)",
    r"(?:\d{0,1}|(?=[\d.]{1,2}0*$)\d*\.\d*0*$)",
    r"(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)",
    r"(?:\d{0,0}|(?=[\d.]{1,3}0*$)\d{0,0}\.\d{0,2}0*$)",
    r"(?:\d{0,4}|(?=[\d.]{1,5}0*$)\d{0,4}\.\d{0,0}0*$)",
]
NUMBERS = st.from_regex(r"[-+]?[0-9]{0,8}\.?[0-9]{0,8}", fullmatch=True) | st.text("0012.+-9 e", max_size=9)


@pytest.mark.parametrize("rest", EXACT)
@given(text=NUMBERS)
def test_decimal_pattern_takes_the_same_texts(rest: str, text: str) -> None:
    pattern = rf"^(?!^[-+.]*$)[+-]?0*{rest}"
    made = without_look_ahead(pattern)
    assert "(?!" not in made
    assert bool(re.search(made, text, re.ASCII)) == bool(re.search(pattern, text, re.ASCII))


@pytest.mark.parametrize("rest", NARROWER)
@given(text=NUMBERS)
def test_bounded_decimal_pattern_takes_what_it_means(rest: str, text: str) -> None:
    pattern = rf"^(?!^[-+.]*$)[+-]?0*{rest}"
    made = without_look_ahead(pattern)
    meant = pattern.replace("|", "$|", 1)  # one of its branches has no end
    assert "(?" not in made.replace("(?:", "")
    assert bool(re.search(made, text, re.ASCII)) == bool(re.search(meant, text, re.ASCII))
    assert not re.search(made, text, re.ASCII) or re.search(pattern, text, re.ASCII)


@pytest.mark.parametrize(
    "pattern",
    ["^(?!a)b$", r"^(?!^[-+.]*$)[+-]?0*x", "a", r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,99}|(?=[\d.]{1,100}0*$)\d*\.\d*0*$)"],
)
def test_other_patterns_stay_as_they_are(pattern: str) -> None:
    assert without_look_ahead(pattern) == pattern


@pytest.mark.parametrize("rest", [*EXACT, *NARROWER])
def test_decimal_patterns_are_kept(rest: str, grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = {"type": "string", "pattern": rf"^(?!^[-+.]*$)[+-]?0*{rest}", "maxLength": 12}
    for answer in answers(schema, grammars, tokenizer):
        jsonschema.validate(answer, schema)
        Decimal(answer)
