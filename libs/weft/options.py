"""Choices and checks that settings and options of the command line share. Imports no library, for a fast start."""

from __future__ import annotations

import ipaddress
import re
from enum import StrEnum

from weft.errors import ConfigError

# Hosts to listen on; peers cannot call them.
WILDCARD_HOSTS = ("0.0.0.0", "::")
MAX_PORT = 65_535
HOW_TO_INSTALL = "pip install 'weft[cpu]' (with CUDA 12 or 13, 'weft[cuda12]' or 'weft[cuda13]')"
# Limit for torch and reader threads: more than any machine has cores, fewer than a process may have threads.
MAX_THREADS = 1024
# On a CPU, steps share cores with event loops, gateway and scheduler, which need a tenth of a core and must
# run first. A GPU's thread keeps niceness 0, because a delay would leave the device idle.
CPU_NICENESS, MAX_NICENESS = 10, 19
MAX_RANKS = 64
CPU_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


class CpuKernels(StrEnum):
    """CPU kernel variants. `weft_kernels.native` reads the variable itself, but late.

    Declared here so that a typo fails at startup instead of at first use.
    """

    AMX = "amx"
    AVX512_BF16 = "avx512_bf16"
    AVX512 = "avx512"
    AVX2 = "avx2"
    TORCH = "torch"


class Dtype(StrEnum):
    """dtype of computation and KV cache; auto is float32 on CPU, bfloat16 on CUDA."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class DeviceChoice(StrEnum):
    """Device to compute on; auto is the GPU if torch can use one, else the CPU."""

    AUTO = "auto"
    CUDA = "cuda"


class WeightFormat(StrEnum):
    """How matrices stay in memory: as published, or packed losslessly to 12 bits; auto packs on a CPU."""

    AUTO = "auto"
    PLAIN = "plain"
    PACKED12 = "packed12"


class TransportChoice(StrEnum):
    """How KV blocks are pulled; auto tries a local pool's file, then Mooncake over TCP, then gRPC.

    `rdma` tries a local pool's file, then Mooncake over RDMA. With `mooncake` or `rdma`, a worker without Mooncake does
    not start.
    """

    AUTO = "auto"
    MOONCAKE = "mooncake"
    RDMA = "rdma"
    GRPC = "grpc"


class StoreFetchPolicy(StrEnum):
    """Which blocks to fetch from the store: those cheaper to fetch than to compute, or all."""

    CHEAPER = "cheaper"
    ALWAYS = "always"


class DraftChoice(StrEnum):
    """Where drafts of the next tokens come from. Any other text names the directory of a draft head.

    `ngram` copies earlier tokens and the client's prediction. `auto`, `mtp` and heads also take tokens that a grammar
    forces. `mtp` adds the layer that drafts in the model's own checkpoint; `auto` adds the head in the model's folder
    `draft`, if there is one. On a GPU `auto` does not speculate: steps with drafts have not run on one yet.
    """

    AUTO = "auto"
    NGRAM = "ngram"
    MTP = "mtp"
    NONE = "none"


HEAD_OF_ONE_MODEL = "one head cannot draft for several models; put each head into the folder draft of its model"


def has_draft_model(draft: str, is_gpu: bool) -> bool:
    """Return whether WEFT_DRAFT allows a draft model on this device; with `auto` there need not be one."""
    return not is_gpu if draft == DraftChoice.AUTO else draft not in (DraftChoice.NGRAM, DraftChoice.NONE)


def names_draft_head(draft: str) -> bool:
    """Return whether WEFT_DRAFT names a draft head by its directory, Hub name or URL."""
    return draft not in set(DraftChoice)


# Limits of WEFT_DRAFT_TOKENS. Rows beyond the first 16 of a sequence take another path through CPU kernels.
MAX_DRAFT_TOKENS = 15


def check_addresses(name: str, addresses: str) -> None:
    """Check the ports of comma-separated peer addresses. Raises ConfigError.

    gRPC would use the lower 16 bits of a larger number and call another service there.
    """
    for address in addresses.split(","):
        _, colon, port = address.strip().rpartition(":")
        if colon and port.isdecimal() and not 0 < float(port) <= MAX_PORT:
            raise ConfigError(f"{name}={address.strip()!r}: expected a port of 1 to {MAX_PORT}")


def redact_credentials(url: str) -> str:
    """Replace the credentials of a URL by ***, also those in its query, which Valkey clients accept."""
    return re.sub(r"//.*@", "//***@", re.sub(r"([?&](?:username|password)=)[^&]*", r"\1***", url))


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`. Any name other than localhost counts as remote.

    IPv6 addresses may stand in brackets, as compose requires before a port.
    """
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host == "localhost"


def parse_cpus(text: str) -> frozenset[int]:
    """Parse a CPU list as Linux writes it, `0-3,8`. Raises ConfigError."""
    cpus: set[int] = set()
    for part in text.split(","):
        match = CPU_RANGE.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"WEFT_CPUS={text!r}: expected a list of CPUs, as in 0-3,8")
        cpus.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(cpus)
