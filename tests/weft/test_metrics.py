"""The listener of metrics."""

from __future__ import annotations

import pytest

from weft.errors import BindError
from weft.metrics import expose


@pytest.mark.parametrize("host", ["a..b", "192.0.2.1"])
def test_a_host_that_is_none_or_another_machines_is_named_with_its_variable(host: str) -> None:
    with pytest.raises(BindError, match=rf"cannot listen on {host}:0 for metrics \(WEFT_METRICS_PORT\): \w+"):
        expose(host, 0)
