"""The options of `weft up`. The command imports `up.py` only when it runs, which keeps `weft --help` fast."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weft.options import MAX_DRAFT_TOKENS, MAX_RANKS, MAX_THREADS, DraftChoice, Dtype, TransportChoice, WeightFormat


class LogLevelOption(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def up(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="As --model: a Hub name ORG/REPO[@REVISION], a directory or a URL."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]ORG/REPO|DIR|URL",
            help="Hub name, directory or s3:// URL; repeat for more models. Default: WEFT_MODEL or weft-nano.",
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="The only model's name in requests; default: its directory's.")] = "",
    host: Annotated[str, typer.Option(help="Address of the gateway; 0.0.0.0 opens it to the network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, help="Public gRPC port.")] = 9000,
    prefill: Annotated[int | None, typer.Option(min=0, max=64, help="Prefill workers of each model.  [1]")] = None,
    decode: Annotated[int | None, typer.Option(min=0, max=64, help="Decode workers of each model.  [1]")] = None,
    both: Annotated[
        int, typer.Option(min=0, max=64, help="Workers with both roles; replace --prefill and --decode.")
    ] = 0,
    gateways: Annotated[int, typer.Option(min=1, max=64, help="Gateway processes; they share their ports.")] = 1,
    dtype: Annotated[
        Dtype, typer.Option(envvar="WEFT_DTYPE", help="Type of weights and KV cache; auto: bfloat16 on a GPU.")
    ] = Dtype.AUTO,
    weight_format: Annotated[
        WeightFormat,
        typer.Option(
            envvar="WEFT_WEIGHT_FORMAT",
            help="Weights in memory; packed12: bfloat16 in 12 bits, lossless. auto: packed12 on a CPU, else plain.",
        ),
    ] = WeightFormat.AUTO,
    transport: Annotated[
        TransportChoice,
        typer.Option(
            envvar="WEFT_TRANSPORT", help="Transport of KV blocks; auto: shared memory, else Mooncake, else gRPC."
        ),
    ] = TransportChoice.AUTO,
    threads: Annotated[
        int,
        typer.Option(
            min=0, max=MAX_THREADS, envvar="WEFT_THREADS", help="torch threads per worker; 0 shares the cores."
        ),
    ] = 0,
    max_seqs: Annotated[
        int,
        typer.Option(min=0, envvar="WEFT_MAX_SEQS", help="Maximum sequences per step; 0: 64 on a CPU, 256 on a GPU."),
    ] = 0,
    draft: Annotated[
        str,
        typer.Option(
            metavar="auto|ngram|mtp|none|DIR|ORG/REPO",
            envvar="WEFT_DRAFT",
            help="Drafts that steps verify; ngram: copied tokens; DIR: also of this draft head; mtp: also of the "
            "model's own layer; auto: of the head in the model's folder draft, none on a GPU.",
        ),
    ] = DraftChoice.AUTO.value,
    draft_layers: Annotated[
        str,
        typer.Option(
            envvar="WEFT_DRAFT_LAYERS",
            help="Boundaries of layers that the draft head reads, as 2,16,29; empty: as its files say, or by scoring.",
        ),
    ] = "",
    draft_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_DRAFT_TOKENS,
            envvar="WEFT_DRAFT_TOKENS",
            help="Maximum drafts of a sequence in a step; 0: 15 on a CPU, 7 on a GPU.",
        ),
    ] = 0,
    tp: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_RANKS,
            envvar="WEFT_TP",
            help="Processes that compute each worker's model together, each with its part of every layer (CPU).",
        ),
    ] = 1,
    ep: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_RANKS, envvar="WEFT_EP", help="Groups of whole experts among the processes of --tp."
        ),
    ] = 1,
    keys: Annotated[
        str, typer.Option(envvar="WEFT_KEYS", help="File or Valkey URL of the accepted API keys; see `weft keys`.")
    ] = "",
    allow_unauthenticated: Annotated[
        bool,
        typer.Option(
            "--allow-unauthenticated",
            envvar="WEFT_ALLOW_UNAUTHENTICATED",
            help="Listen on --host without API keys; every client that reaches it may use the model.",
        ),
    ] = False,
    cors_origins: Annotated[
        str,
        typer.Option(
            envvar="WEFT_CORS_ORIGINS", help="Origins of web pages that may use the API, comma-separated, or *."
        ),
    ] = "",
    disk: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep cached KV blocks in this directory, across restarts.")
    ] = None,
    disk_gib: Annotated[int, typer.Option(min=1, max=(1 << 33) - 1, help="Size limit of --disk in GiB.")] = 8,
    weights_from: Annotated[
        str, typer.Option(help="HOST:PORT of another mesh that may have the weights in memory.")
    ] = "",
    weights_listen: Annotated[str, typer.Option(help="HOST:PORT where other meshes can read the weights.")] = "",
    timeline: Annotated[Path | None, typer.Option(help="Write an SVG timeline of the start to this file.")] = None,
    log_level: Annotated[
        LogLevelOption, typer.Option(envvar="WEFT_LOG_LEVEL", case_sensitive=False, help="Log level of all services.")
    ] = LogLevelOption.INFO,
) -> None:
    """Start a whole mesh on this machine; Ctrl-C ends it."""
    from weft.cli.layout import MeshOptions
    from weft.cli.up import UsageError, check_packages, find_draft, find_models
    from weft.cli.up import up as run_up

    try:
        check_packages()  # before a download of gigabytes
        options = MeshOptions(
            models=find_models([*(models or ()), *(model or ())], name),
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
            draft=find_draft(draft),
            draft_layers=draft_layers,
            draft_tokens=draft_tokens,
            tp=tp,
            ep=ep,
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
