"""Before anything else is imported: kernels run in Triton's interpreter where there is no GPU, and gRPC takes no part
in forks.

Triton and gRPC choose when they are first imported, and another package may be the one to import them.
"""

from __future__ import annotations

import gc
import os
import ssl
import sys
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

# how long a peer in the test's own process may say nothing: on a busy machine everything there stands now and then
PATIENT_MS = {
    "grpc.keepalive_timeout_ms": 20_000,
    "grpc.http2.ping_timeout_ms": 20_000,
    "grpc.min_reconnect_backoff_ms": 10_000,
}
PATIENT_CONNECT_SECONDS = 10.0

# of the random tensors of every test; another seed looks elsewhere
SEED = int(os.environ.get("TEST_SEED", "0"))


def pytest_collection_finish() -> None:
    """All that was imported stays. Else every full collection looks at 800,000 objects, for half a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Else what is left when Python ends is reported as leaks by the libraries that it belongs to."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """A test that fails does so again, whichever tests ran before it. Only tensors: ports and prompts must differ."""
    torch.manual_seed(SEED)


@pytest.fixture(scope="session", autouse=True)
def few_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each of a thousand HTTP clients would read all authorities of the web, for 30 ms, and none of them goes there."""
    one = ssl.create_default_context(cafile=certifi.where()).get_ca_certs(binary_form=True)[0]
    path = tmp_path_factory.mktemp("authorities") / "one.pem"
    path.write_text(ssl.DER_cert_to_PEM_cert(one))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield


@pytest.fixture(autouse=True)
def patient_peers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Else a stall of 0.7 s is the loss of a peer. Processes that a test starts have the product's patience, and so has
    what a test does that is marked `quick_to_notice`."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("quick_to_notice") is None:
            _make_patient(patch)
        yield


def _make_patient(patch: pytest.MonkeyPatch) -> None:
    """What is loaded of gRPC's users: tests of kernels also run where there is no gRPC."""
    for name, options in (("weft.rpc.client", "CHANNEL_OPTIONS"), ("weft.rpc.server", "SERVER_OPTIONS")):
        if (module := sys.modules.get(name)) is not None:
            patient = tuple((key, PATIENT_MS.get(key, value)) for key, value in getattr(module, options))
            patch.setattr(module, options, patient)
    if (peers := sys.modules.get("weft_services.gateway.mesh.decode_connection")) is not None:
        patch.setattr(peers, "CONNECT_SECONDS", PATIENT_CONNECT_SECONDS)
