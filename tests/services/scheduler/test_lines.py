"""Whose turn it is among tenants, and what is served before somebody's next request."""

from __future__ import annotations

import pytest

from tests.services.scheduler.fakes import MODEL
from weft.request import RequestKey
from weft_services.scheduler import lines as lines_module
from weft_services.scheduler.lines import MAX_ANSWER_TOKENS, Lines, Waiter, cost_of
from weft_services.scheduler.state import RouteQuery


def waiter(tenant: bytes, prompt_tokens: int, max_tokens: int = 0, since: float = 0.0) -> Waiter:
    query = RouteQuery(RequestKey(tenant.decode()), MODEL, prompt_tokens, max_tokens, tenant=tenant)
    return Waiter(query, since, since + 10)


def test_a_request_counts_for_its_prompt_and_for_a_likely_answer_however_long_it_may_become() -> None:
    assert cost_of(waiter(b"a", 100, 50).query) == 150
    assert cost_of(waiter(b"a", 100, 100_000).query) == 100 + MAX_ANSWER_TOKENS


def test_who_has_had_more_already_is_not_before_others_and_shortens_nobodys_wait() -> None:
    lines = Lines()
    lines.charge(b"much", 5000)
    lines.append(waiter(b"much", 300))
    lines.append(waiter(b"little", 100))
    assert lines.tokens_before(b"little") == 100
    assert lines.tokens_before(b"new") == 100


def test_of_too_many_tenants_those_are_forgotten_that_were_served_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_TENANTS", 2)
    lines = Lines()
    for tenant, tokens in ((b"often", 1000), (b"once", 10), (b"often", 500), (b"new", 5)):
        lines.charge(tenant, tokens)
    lines.append(waiter(b"often", 100, since=1.0))
    lines.append(waiter(b"once", 100, since=2.0))
    first = lines.first()
    assert first is not None
    assert first.query.tenant == b"once"
