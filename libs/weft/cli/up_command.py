"""The options of `weft up`; what they mean is worked out in `up.py`, which is imported when the command is called."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weft.config import INT64, MAX_THREADS


class DTypeOption(StrEnum):
    """--dtype."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class WeightFormatOption(StrEnum):
    """--weight-format."""

    AUTO = "auto"
    PLAIN = "plain"
    PACKED12 = "packed12"


class TransportOption(StrEnum):
    """--transport."""

    AUTO = "auto"
    MOONCAKE = "mooncake"
    GRPC = "grpc"


class LogLevelOption(StrEnum):
    """--log-level."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def up(
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]DIR|URL",
            help="Checkpoint directory or s3:// URL; again for each further model. Default: WEFT_MODEL or weft-nano.",
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="The only model's name in requests; default: its directory's.")] = "",
    host: Annotated[
        str, typer.Option(help="Where the gateway listens; 0.0.0.0 opens it to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP.")] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, help="Public gRPC.")] = 9000,
    prefill: Annotated[int | None, typer.Option(min=0, max=64, help="Prefill workers of each model.  [1]")] = None,
    decode: Annotated[int | None, typer.Option(min=0, max=64, help="Decode workers of each model.  [1]")] = None,
    both: Annotated[int, typer.Option(min=0, max=64, help="Workers that do both; then the others need not be.")] = 0,
    gateways: Annotated[int, typer.Option(min=1, max=64, help="Gateway processes, which share their ports.")] = 1,
    dtype: Annotated[
        DTypeOption, typer.Option(envvar="WEFT_DTYPE", help="Of weights and KV cache; auto: bfloat16 on a GPU.")
    ] = DTypeOption.AUTO,
    weight_format: Annotated[
        WeightFormatOption,
        typer.Option(
            envvar="WEFT_WEIGHT_FORMAT",
            help="Weights in memory; packed12: bfloat16 in 12 bits, lossless. auto: packed12 on a CPU, else plain.",
        ),
    ] = WeightFormatOption.AUTO,
    transport: Annotated[
        TransportOption,
        typer.Option(envvar="WEFT_TRANSPORT", help="Of KV blocks; auto: shared memory, Mooncake, gRPC."),
    ] = TransportOption.AUTO,
    threads: Annotated[
        int,
        typer.Option(min=0, max=MAX_THREADS, envvar="WEFT_THREADS", help="torch threads a worker; 0 shares the cores."),
    ] = 0,
    max_seqs: Annotated[
        int, typer.Option(min=0, envvar="WEFT_MAX_SEQS", help="Sequences of a step; 0: 64 on a CPU, 256 on a GPU.")
    ] = 0,
    keys: Annotated[str, typer.Option(envvar="WEFT_KEYS", help="API keys that are asked for; see `weft keys`.")] = "",
    allow_unauthenticated: Annotated[
        bool,
        typer.Option(
            "--allow-unauthenticated",
            envvar="WEFT_ALLOW_UNAUTHENTICATED",
            help="Listen on --host without API keys; every client that reaches it may use the model.",
        ),
    ] = False,
    cors_origins: Annotated[
        str, typer.Option(envvar="WEFT_CORS_ORIGINS", help="Web pages that may use the API: origins by commas, or *.")
    ] = "",
    disk: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Cached blocks are kept there, too, over restarts.")
    ] = None,
    disk_gib: Annotated[int, typer.Option(min=1, max=(INT64.stop >> 30) - 1, help="What they may take of it.")] = 8,
    weights_from: Annotated[str, typer.Option(help="HOST:PORT of a mesh that may hold the weights in memory.")] = "",
    weights_listen: Annotated[str, typer.Option(help="HOST:PORT where other meshes may read the weights.")] = "",
    timeline: Annotated[Path | None, typer.Option(help="Write a picture (SVG) of how the start went here.")] = None,
    log_level: Annotated[
        LogLevelOption, typer.Option(envvar="WEFT_LOG_LEVEL", case_sensitive=False, help="Of all services.")
    ] = LogLevelOption.INFO,
) -> None:
    """Start a whole mesh on this machine; Ctrl-C ends it."""
    from weft.cli.layout import MeshOptions
    from weft.cli.up import UsageError, find_models
    from weft.cli.up import up as run_up

    try:
        options = MeshOptions(
            models=find_models(model or (), name),
            host=host,
            port=port,
            grpc_port=grpc_port,
            num_prefill=prefill if prefill is not None else int(not both),
            num_decode=decode if decode is not None else int(not both),
            num_both=both,
            num_gateways=gateways,
            dtype=dtype,
            weight_format=weight_format,
            transport=transport,
            threads=threads,
            max_seqs=max_seqs,
            keys=keys,
            allow_unauthenticated=allow_unauthenticated,
            cors_origins=cors_origins,
            has_tls=bool(os.environ.get("WEFT_TLS_CERT")),
            disk=disk,
            disk_gib=disk_gib,
            weights_from=weights_from,
            weights_listen=weights_listen,
            log_level=log_level,
        )
        status = run_up(options, timeline)
    except UsageError as error:
        typer.secho(f"weft up: {error}", fg="red", err=True)
        status = 2
    raise typer.Exit(status)
