"""The models' files, and whether shared memory and the workers' own have room for them, by `weft plan`'s figures."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from weft.capacity.draft import draft_size
from weft.capacity.host_limits import available_bytes
from weft.capacity.layout import GIB
from weft.capacity.sizes import MemoryBudget, Sizes, choose_sizes, default_num_blocks
from weft.cli.doctor import Finding, Severity, Subject
from weft.cli.layout import all_report_memory, cards, chosen_cards, usable_gpus
from weft.cli.memory import SHARED_MEMORY, held_bytes, is_for_cpus_only, shared_memory, stored_config
from weft.cli.mesh_registry import running_meshes
from weft.config import read_config as read_settings
from weft.errors import BadCheckpoint, ConfigError, StorageUnavailable
from weft.hub import hub_name
from weft.model.draft_config import DraftConfig
from weft.model.draft_layers import with_draft
from weft.model.kv_layout import block_bytes
from weft.model.spec import ModelConfig
from weft.options import DraftChoice, has_draft_model
from weft.tokenizer import SETTINGS, check_tokenizer
from weft.weights.checkpoint import Checkpoint, read_checkpoint
from weft.weights.draft_checkpoint import DraftFiles, read_draft
from weft.weights.formats import BUNDLE_SUFFIX
from weft.weights.load import uses_huge_pages
from weft.weights.object_store import is_store_url
from weft.worker.config import SizeSettings

LARGE_PAGES_PAY = GIB
LOOK_AT_THE_DISK = "look at the disk, mount or network that the files are on, then try again"
VERIFY_SECONDS = 3600.0
MIB = 1 << 20


def check_model(subject: Subject) -> Iterator[Finding]:
    """Every tensor that the architecture needs, in files that are whole; a tokenizer, a chat template."""
    for name, directory in subject.models.items():
        if trouble := _trouble(directory / SETTINGS):  # which also names an end token, part of the model's config
            says = f"{name}: {SETTINGS}: {trouble}: the gateway does not start"
            yield Finding("settings", Severity.FAILURE, says, "fetch the file again")
            continue
        try:
            checkpoint = read_checkpoint(directory)
        except BadCheckpoint as error:
            says, _, advice = str(error).partition("; ")
            advice = advice or "fetch the files again, or name another: --model"
            yield Finding("model", Severity.FAILURE, f"{name}: {says}", advice)
            continue
        except StorageUnavailable as error:
            yield Finding("model", Severity.FAILURE, f"{name}: {error}", LOOK_AT_THE_DISK)
            continue
        files = {tensor.file.name for tensor in checkpoint.tensors}
        says = f"{name}: {len(checkpoint.tensors)} tensors, {_size(checkpoint.total_bytes)}, files: {len(files)}"
        unread = f"; not read: {', '.join(checkpoint.unread_files)}" if checkpoint.unread_files else ""
        yield Finding("model", Severity.OK, f"{says}; sizes and offsets agree{unread}")
        yield from _draft_finding(name, directory)
        if any(file.endswith(BUNDLE_SUFFIX) for file in files):
            yield _verified(name, directory, subject.is_deep)
        try:
            check_tokenizer(directory)
        except BadCheckpoint as error:
            says, _, advice = str(error).partition("; ")
            advice = advice or "fetch the file again"
            yield Finding("tokenizer", Severity.FAILURE, f"{name}: {says}: the gateway does not start", advice)
        except StorageUnavailable as error:
            yield Finding("tokenizer", Severity.FAILURE, f"{name}: {error}", LOOK_AT_THE_DISK)
        if not _has_template(directory):
            yield Finding("template", Severity.WARNING, f"{name}: no chat template: only /v1/completions answers")


def _draft_finding(name: str, directory: Path) -> Iterator[Finding]:
    """Describe the draft model that workers on a CPU load, if there is one."""
    try:
        source = read_draft(_draft_setting(), directory)
    except BadCheckpoint as error:
        says, _, advice = str(error).partition("; ")
        advice = f"{advice or 'fetch the files again'}, or set WEFT_DRAFT=ngram"
        yield Finding("draft", Severity.FAILURE, f"{name}: {says}: workers do not start", advice)
        return
    except StorageUnavailable as error:
        yield Finding("draft", Severity.FAILURE, f"{name}: {error}", LOOK_AT_THE_DISK)
        return
    if source is not None:
        reads = "its layer drafts"
        if isinstance(config := source.config, DraftConfig):
            reads = f"a draft head for boundaries {', '.join(map(str, config.boundaries))}"
            reads += "" if config.names_boundaries else " or others, which workers find by scoring"
        yield Finding("draft", Severity.OK, f"{name}: {reads}, {_size(source.checkpoint.total_bytes)}")


def _draft_setting() -> str:
    """Return WEFT_DRAFT; a head that a start would fetch first is not looked at."""
    setting = os.environ.get("WEFT_DRAFT") or DraftChoice.AUTO
    return DraftChoice.NONE if is_store_url(setting) or hub_name(setting) else setting


def _has_template(model: Path) -> bool:
    """As far as can be told: of settings that cannot be read that has been said."""
    settings = model / SETTINGS
    try:
        return (model / "chat_template.jinja").is_file() or (
            settings.is_file() and '"chat_template"' in settings.read_text(errors="replace")
        )
    except OSError:
        return True


def _trouble(path: Path) -> str:
    """Why these settings cannot be read."""
    try:
        return "" if not path.is_file() or isinstance(json.loads(path.read_bytes()), dict) else "no JSON object"
    except (OSError, ValueError) as error:
        return str(error)


def _verified(name: str, directory: Path, is_deep: bool) -> Finding:
    """A bundle keeps checksums of the tensors that it stands for."""
    if not is_deep:
        says = f"{name}: checksums were not compared"
        return Finding("bundle", Severity.OK, says, "weft doctor --deep decodes the bundle whole")
    command = [sys.executable, "-m", "weft_bundle", "verify", str(directory)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=VERIFY_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Finding("bundle", Severity.FAILURE, f"{name}: not decoded within {VERIFY_SECONDS:.0f} s")
    if ended.returncode < 0:
        says = f"{name}: decoding it was ended by a signal: {signal.strsignal(-ended.returncode)}"
        return Finding(
            "bundle", Severity.FAILURE, says, "the system's log (dmesg) may say why: no memory left, for one"
        )
    if ended.returncode:
        last = (ended.stderr.strip() or ended.stdout.strip()).rpartition("\n")[2]
        advice = LOOK_AT_THE_DISK if ended.returncode == 1 else "make it again: weft compress MODEL OUT"
        return Finding("bundle", Severity.FAILURE, f"{name}: {last}", advice)
    return Finding("bundle", Severity.OK, f"{name}: decodes to its checksums")


def check_shared_memory(subject: Subject) -> Iterator[Finding]:
    """The weights service keeps the checkpoints there."""
    needed = sum(checkpoint.total_bytes for checkpoint in _readable(subject).values())
    needed += sum(source.checkpoint.total_bytes for source in _drafts(subject).values())
    if not needed or not SHARED_MEMORY.is_dir():
        return
    free, total = shared_memory()
    free += held_bytes()
    says = f"{_size(free)} of {_size(total)} free in {SHARED_MEMORY}, the weights take {_size(needed)}"
    if free < needed:
        size = needed // GIB + 1
        advice = f"mount -o remount,size={size}G {SHARED_MEMORY} (compose: WEFT_SHM_SIZE={size}g)"
        yield Finding("shared memory", Severity.FAILURE, says, advice)
    elif needed >= LARGE_PAGES_PAY and not uses_huge_pages(SHARED_MEMORY):
        advice = f"as root: mount -o remount,huge=within_size {SHARED_MEMORY}"
        yield Finding("shared memory", Severity.WARNING, f"{says}, in pages of 4 KiB: writing them slows loads", advice)
    else:
        yield Finding("shared memory", Severity.OK, says)


def check_memory(subject: Subject) -> Iterator[Finding]:
    """Check the memory of each worker, as the worker does at its start."""
    try:
        wanted = read_settings(SizeSettings).wanted
    except ConfigError as error:
        yield Finding("memory", Severity.FAILURE, str(error), "correct it, or unset it")
        return
    checkpoints = _readable(subject)
    found = cards()
    usable = usable_gpus(os.environ, found)
    sizes = choose_sizes(wanted, has_cuda=bool(usable) and not is_for_cpus_only())
    is_gpu = sizes.machine.device == "cuda"
    drafts = _drafts(subject) if has_draft_model(_draft_setting(), is_gpu) else {}
    if is_gpu:
        found = chosen_cards(found, usable)
        if not all_report_memory(found):
            yield Finding(
                "memory", Severity.OK, "nvidia-smi does not report the GPUs' memory; workers check it at their start"
            )
            return
        free = min(card.free_bytes for card in found) // math.ceil(subject.num_workers / len(found))
    else:
        images = sum(checkpoint.total_bytes for checkpoint in checkpoints.values())
        images += sum(source.checkpoint.total_bytes for source in drafts.values())
        free = max(0, available_bytes() + held_bytes() - images) // subject.num_workers
    for name, checkpoint in checkpoints.items():
        found_room = _room(name, stored_config(checkpoint), drafts.get(name), sizes, free)
        if found_room.level is not Severity.OK and running_meshes():
            says = f"{found_room.says}; but a running mesh already holds its memory"
            found_room = Finding("memory", Severity.OK, says, "run weft doctor again when no mesh runs")
        yield found_room


def _room(name: str, config: ModelConfig, source: DraftFiles | None, sizes: Sizes, free: int) -> Finding:
    machine = sizes.machine
    draft = draft_size(source.config, machine.dtype, machine.device == "cpu") if source else None
    config = with_draft(config, draft.layer) if draft else config
    room = sizes.memory_budget(config, free, draft)
    size = block_bytes(config, machine.dtype, machine.block_tokens)
    pages = sizes.num_blocks or default_num_blocks(room, machine.device == "cpu", size, 0, sys.maxsize)
    longest = sizes.paging(config).max_sequence_tokens(pages, config.max_positions)
    says = f"{name}: {_sum(room, machine.dtype)}"
    if room.available_for_kv <= 0 or longest < 1:
        advice = "`weft plan` says what it needs; fewer workers, a smaller WEFT_CHUNK_TOKENS, or more memory"
        return Finding("memory", Severity.FAILURE, f"{says}: the model does not fit", advice)
    if longest < config.max_positions:
        advice = f"the model's own context is {config.max_positions:,}"
        return Finding("memory", Severity.WARNING, f"{says}: a context of {longest:,} tokens at most", advice)
    return Finding("memory", Severity.OK, f"{says}: sequences of {config.max_positions:,} tokens fit")


def _sum(room: MemoryBudget, dtype: str) -> str:
    parts = f"{_size(room.weights)} of weights and {_size(room.activations)} of activations"
    left = _size(room.available_for_kv)
    return f"each worker has {_size(room.free)} and needs {parts} in {dtype}, {left} are left for KV"


def _readable(subject: Subject) -> dict[str, Checkpoint]:
    """What is wrong with the others has been said by then."""
    found = {}
    for name, directory in subject.models.items():
        with suppress(BadCheckpoint, StorageUnavailable):
            found[name] = read_checkpoint(directory)
    return found


def _drafts(subject: Subject) -> dict[str, DraftFiles]:
    """Return the draft models that can be read, by the names of their targets."""
    found = {}
    for name in _readable(subject):
        with suppress(BadCheckpoint, StorageUnavailable):
            if (source := read_draft(_draft_setting(), subject.models[name])) is not None:
                found[name] = source
    return found


def _size(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB else f"{size / MIB:.1f} MiB"
