"""Schemas of any shape are refused or kept, and never end in another error."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.grammars.test_schema_forms import grammars
from weft.grammar import Grammars, UnusableGrammar
from weft_services.gateway.dialects.answer_format import schema_problem
from weft_services.gateway.grammar.answer_grammar import join_parts, schema_part
from weft_services.gateway.grammar.request_grammar import locate_error
from weft_services.gateway.grammar.schema_rewrite import BINDING, COUNTS, DRAFTS, NO_OPS

__all__ = ["grammars"]

KEYWORDS = st.sampled_from(
    sorted({*BINDING, *NO_OPS, *COUNTS, "then", "discriminator", "$defs", "definitions", "$schema"})
)
TEXTS = st.sampled_from(["object", "string", "a", "#/$defs/a", "#", "(a", "date", *DRAFTS.values()])
LEAVES = st.none() | st.booleans() | st.integers(-1, 3) | st.sampled_from([0.5, 1.0, 1e300]) | TEXTS
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS | st.just("a"), inner, max_size=4),
    max_leaves=12,
)


@given(schema=st.dictionaries(KEYWORDS, SCHEMAS, max_size=5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
def test_any_shape_is_kept_or_refused(schema: dict[str, Any], grammars: Grammars) -> None:
    if schema_problem(schema) is not None:
        return
    parts = [schema_part(schema, "answer", "schema")]
    told = None
    try:
        grammars.compile(join_parts(parts))
    except UnusableGrammar as error:
        told = str(locate_error(error, parts, "schema"))
    assert told is None or told.startswith("schema")
