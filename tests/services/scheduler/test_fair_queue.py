"""Whose turn it is among tenants, and what is served before somebody's next request."""

from __future__ import annotations

import pytest

from tests.services.scheduler.fakes import MODEL
from weft.fleet_types import RouteQuery
from weft.request import RequestKey
from weft_services.scheduler import admission_queue as queue_module
from weft_services.scheduler.admission_queue import MAX_ANSWER_TOKENS, FairQueue, QueuedRequest, cost_tokens


def queued(tenant: bytes, prompt_tokens: int, max_tokens: int = 0, since: float = 0.0) -> QueuedRequest:
    query = RouteQuery(RequestKey(tenant.decode()), MODEL, prompt_tokens, max_tokens, tenant=tenant)
    return QueuedRequest(query, since, since + 10)


def test_a_request_counts_for_its_prompt_and_for_a_likely_answer_however_long_it_may_become() -> None:
    assert cost_tokens(queued(b"a", 100, 50).query) == 150
    assert cost_tokens(queued(b"a", 100, 100_000).query) == 100 + MAX_ANSWER_TOKENS


def test_who_has_had_more_already_is_not_before_others_and_shortens_nobodys_wait() -> None:
    queues = FairQueue()
    queues.charge(b"much", 5000)
    queues.append(queued(b"much", 300))
    queues.append(queued(b"little", 100))
    assert queues.tokens_before(b"little") == 100
    assert queues.tokens_before(b"new") == 100


def test_of_too_many_tenants_those_are_forgotten_that_were_served_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "MAX_TENANTS", 2)
    queues = FairQueue()
    for tenant, tokens in ((b"often", 1000), (b"once", 10), (b"often", 500), (b"new", 5)):
        queues.charge(tenant, tokens)
    queues.append(queued(b"often", 100, since=1.0))
    queues.append(queued(b"once", 100, since=2.0))
    first = queues.first()
    assert first is not None
    assert first.query.tenant == b"once"
