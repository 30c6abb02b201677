"""How large a JSON schema may be before anyone compiles it: size, depth, and what is known to explode. No recursion."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeGuard

import orjson

from weft_services.gateway.dialects.body_limits import depth_of

MAX_BYTES = 64 * 1024
MAX_DEPTH = 64  # of its JSON: a level of a schema is two of them, properties and the name
MAX_OBJECTS = 2048
MAX_PROPERTIES = 512
MAX_BRANCHES = 128
MAX_VALUES = 1000
MAX_MULTIPLE = 2000
# the compiler takes numbers for doubles, and integers for what fits into 64 bits: at the least of those it ends the
# process. The largest is right all the same: schemas of int64 say it, and it comes back as what it was
LEAST, MOST = -(2**63), 2**63 - 1
BRANCHES = ("anyOf", "oneOf", "allOf")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def complaint(schema: dict[str, Any]) -> str | None:
    """What is too large about it."""
    if (depth := depth_of(schema)) > MAX_DEPTH:
        return f"is nested {depth} levels deep, at most {MAX_DEPTH}"
    try:
        size = len(orjson.dumps(schema))
    except TypeError:
        return "has an integer of more than 64 bits"
    if size > MAX_BYTES:
        return f"has {size} bytes, at most {MAX_BYTES}"
    multiple = 1
    for number, each in enumerate(_objects(schema)):
        if number >= MAX_OBJECTS:
            return f"has more than {MAX_OBJECTS} objects"
        if (found := _own_complaint(each) or _inexact(each)) is not None:
            return found
        # an automaton that counts remainders has as many states, and several of them multiply
        multiple = math.lcm(multiple, _coefficient(each.get("multipleOf")))
        if multiple > MAX_MULTIPLE:
            return f"has a multipleOf, or several that meet, above {MAX_MULTIPLE}"
    return None


def _objects(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    waiting: list[Any] = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _own_complaint(schema: dict[str, Any]) -> str | None:
    if len(schema) > MAX_PROPERTIES:
        return f"has an object with {len(schema)} keys, at most {MAX_PROPERTIES}"
    for name, value in schema.items():
        limit = MAX_BRANCHES if name in BRANCHES else MAX_VALUES
        if isinstance(value, list) and len(value) > limit:
            return f"has {len(value)} entries in {name[:32]}, at most {limit}"
    return None


def _inexact(schema: dict[str, Any]) -> str | None:
    """A number of its own, or of a value that it names, that would become another one."""
    if _is_number(multiple := schema.get("multipleOf")) and multiple <= 0:
        return f"has {multiple} as its multipleOf, which must be above 0"
    for name in BOUNDS:
        if _is_number(value := schema.get(name)) and not (_is_kept(value) or value > MOST):
            return f"has {value} as its {name}, which is not kept exactly"
    named = [schema.get("const"), schema.get("enum")]
    while named:
        value = named.pop()
        if isinstance(value, list | dict):
            named += value.values() if isinstance(value, dict) else value
        elif _is_number(value) and not _is_kept(value):
            return f"names {value}, which is not kept exactly"
    return None


def _is_kept(value: int | float) -> bool:
    return value == MOST or (LEAST < float(value) < MOST and float(value) == value)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _coefficient(multiple: Any) -> int:
    """Digits without powers of ten, which cost nothing: 0.05 counts as 5, 300 as 3."""
    if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not 0 < multiple < math.inf:
        return 1
    digits = int("".join(map(str, Decimal(str(multiple)).as_tuple().digits)))
    while digits % 10 == 0:
        digits //= 10
    return digits
