"""Before anything else is imported: kernels run in Triton's interpreter where there is no GPU, and gRPC takes no part
in forks.

Triton and gRPC choose when they are first imported, and another package may be the one to import them.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator

import certifi
import pytest
import torch
from hypothesis import HealthCheck, settings

# children that run a program of their own at once; gRPC's handlers fail in them while its threads are busy
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# how long an example takes to draw or to run says how busy the machine is
settings.register_profile("weft", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("weft")


@pytest.fixture(scope="session", autouse=True)
def few_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each of a thousand HTTP clients would read all authorities of the web, for 30 ms, and none of them goes there."""
    one = ssl.create_default_context(cafile=certifi.where()).get_ca_certs(binary_form=True)[0]
    path = tmp_path_factory.mktemp("authorities") / "one.pem"
    path.write_text(ssl.DER_cert_to_PEM_cert(one))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield
