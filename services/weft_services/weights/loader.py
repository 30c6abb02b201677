"""Brings the model into shared memory: found there, or read once for however many ask at the same time."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from weft.errors import BadCheckpoint, Cancelled, Incompatible, PeerLost, StorageUnavailable, WeftError
from weft.file_io import os_errors_translated, to_weft_error
from weft.weights.checkpoint import Checkpoint, files_state, read_checkpoint
from weft.weights.image import Image, ReaderWrapper, find_image, is_mapped, remove_stale, write_image
from weft.weights.image_layout import image_layout
from weft.weights.load import PeerFirstReader, RunReader, check_samples
from weft.weights.tied_head import possible_checkpoints, resolve_tied_head
from weft_services.weights.peers import PeerImage, WeightsPeer
from weft_services.weights.shm_budget import ShmBudget

logger = logging.getLogger(__name__)
PROGRESS_SECONDS = 0.1
FILES, MEMORY = "files", "memory"


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """How much of the checkpoint has been read."""

    read_bytes: int
    total_bytes: int
    file: str


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """The model is in shared memory."""

    image: Image
    config_json: str
    source: str

    @property
    def read_from_disk(self) -> bool:
        """Has its maker read the checkpoint's files for it."""
        return self.source == FILES


class WeightLoader:
    """One model of one node. `tasks` outlives every load; a caller that leaves does not end the reading for others.

    `peer` is asked first, where there is one; whatever it cannot give comes from the checkpoint's files.
    """

    def __init__(
        self,
        directory: Path,
        num_readers: int,
        tasks: asyncio.TaskGroup,
        peer: WeightsPeer | None = None,
        room: ShmBudget | None = None,
    ) -> None:
        self.name = directory.name
        self._budget = room or ShmBudget()
        self._budget.register(self)
        self._directory = directory
        self._num_readers = num_readers
        self._peer = peer
        self._tasks = tasks
        self._loaded: LoadedWeights | None = None
        self._loading: asyncio.Task[LoadedWeights | WeftError] | None = None
        self._progress = ReadProgress(0, 0, "")
        self._progress_lock = threading.Lock()
        self._is_stopping = False
        self._is_wanted = False
        self._state: str | None = None  # of the files, when they could not be read; None: they could

    async def load(self, is_ahead: bool = False) -> AsyncIterator[ReadProgress | LoadedWeights]:
        """Progress while it is read, Loaded last; `is_ahead` of anybody who would map it.

        Raises BadCheckpoint, StorageUnavailable, or Overloaded when shared memory is full.
        """
        if not is_ahead:
            self._budget.touch(self)
            self._is_wanted = True
        if self._loaded is not None and self._loaded.image.is_linked():
            yield replace(self._loaded, source=MEMORY)
            return
        if self._loading is None or self._loading.done():
            self._loading = self._tasks.create_task(self._fetch())
        flight = self._loading
        while not flight.done():
            await asyncio.wait({flight}, timeout=PROGRESS_SECONDS)
            if self._progress.total_bytes:
                yield self._progress
        outcome = flight.result()
        if isinstance(outcome, WeftError):
            raise outcome
        yield outcome

    @property
    def image(self) -> Image | None:
        """What is held now."""
        return self._loaded.image if self._loaded else None

    @property
    def read_bytes(self) -> int:
        """Of the files, as far as this is being done."""
        return self._progress.read_bytes

    def drop(self) -> None:
        """Hold the image no more; whoever calls releases it."""
        self._loaded = None

    async def close(self) -> None:
        """End what is under way, and let go of the image. Nobody may ask any more.

        What workers map stays for whoever comes after this process: read again, it would take memory twice.
        """
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.wait({self._loading})
        if (image := self.image) is not None and is_mapped(image.fd):
            logger.info("left for those who map it: %s", image.name)
            self.drop()
            image.close()
        self.release()

    def release(self) -> None:
        """Let go of the image; the last holder removes it."""
        if (image := self.image) is not None:
            self.drop()
            image.release()

    async def fits(self) -> bool:
        """Is there room, without another model's image going. Raises BadCheckpoint, StorageUnavailable."""
        with os_errors_translated(f"{self._directory}"):
            checkpoint = await asyncio.to_thread(self._read_checkpoint)
            known_by = await asyncio.to_thread(possible_checkpoints, checkpoint)
            found = next(filter(None, map(find_image, known_by)), None)
            if found is None:
                return await self._budget.fits(image_layout(checkpoint).size_bytes)
            try:  # held meanwhile: it must not go to make room for itself
                return await self._budget.fits(found.size_bytes, is_there=True)
            finally:
                found.close()

    async def _fetch(self) -> LoadedWeights | WeftError:
        """An error is handed to those who wait; in the task group it would end the process."""
        try:
            checkpoint = await asyncio.to_thread(self._read_checkpoint)
            if checkpoint.unread_files:
                files = sorted({tensor.file.name for tensor in checkpoint.tensors})
                logger.info("weights chosen files=%s unread=%s", ",".join(files), ",".join(checkpoint.unread_files))
            checkpoint = await asyncio.to_thread(resolve_tied_head, checkpoint, self._num_readers)
            for name in await asyncio.to_thread(remove_stale, checkpoint):
                logger.info("removed a stale image %s", name)
            found = find_image(checkpoint)
            self.release()  # of an earlier state of the files
            if found:
                image, source = await self._admitted(found), MEMORY
            else:
                async with self._budget.reserve(self, image_layout(checkpoint).size_bytes):
                    image, source = await self._read(checkpoint)
        except WeftError as error:
            if isinstance(error, StorageUnavailable):
                self._state = await asyncio.to_thread(self._files_state)
            return error
        except OSError as error:
            return to_weft_error(error, error.filename or f"{self._directory}")
        self._state = None
        self._loaded = LoadedWeights(image, checkpoint.config_json, source)
        if self._is_wanted:
            self._budget.touch(self)  # reading may have taken long: the time to map it begins now
        logger.info(
            "weights from %s image=%s size_bytes=%d hash=%s",
            *(source, image.name, image.size_bytes, image.weights_hash),
        )
        return self._loaded

    async def _admitted(self, found: Image) -> Image:
        try:  # held meanwhile: it must not go to make room for itself
            await self._budget.admit(found.size_bytes)
        except BaseException:
            found.close()
            raise
        return found

    def _read_checkpoint(self) -> Checkpoint:
        """Read the checkpoint's headers.

        Files that are wrong and differ from their last unreadable state are still being written: StorageUnavailable.
        Files that are wrong and unchanged raise BadCheckpoint.
        """
        try:
            return read_checkpoint(self._directory)
        except BadCheckpoint as error:
            before, self._state = self._state, self._files_state()
            if before is None or before == self._state:
                raise
            raise StorageUnavailable(f"{error}; files are being written") from error

    def _files_state(self) -> str:
        try:
            return files_state(self._directory)
        except (WeftError, OSError):
            return ""  # one goes just now, or the disk fails

    async def _read(self, checkpoint: Checkpoint) -> tuple[Image, str]:
        """The image and where it came from."""
        peer = self._peer
        theirs = await self._describe(peer, checkpoint) if peer else None
        if peer is not None and theirs is not None:
            readers: list[PeerFirstReader] = []

            def around(files: RunReader) -> RunReader:
                """What is published here as these files is what they hold, not what the other node's do."""
                read = peer.reader(theirs)
                check_samples(image_layout(checkpoint), read, files, self._num_readers)
                readers.append(PeerFirstReader(read, theirs.leaves, files))
                return readers[0]

            try:
                image = await self._write(checkpoint, around)
            except Incompatible as error:
                logger.warning("%s holds other weights than %s: %s", peer.address, self._directory, error)
            except PeerLost as error:
                logger.warning("weights do not come from %s: %s", peer.address, error)
            else:
                return image, FILES if readers[0].trouble else peer.address
        return await self._write(checkpoint, None), FILES

    async def _describe(self, peer: WeightsPeer, checkpoint: Checkpoint) -> PeerImage | None:
        try:
            return await peer.describe(image_layout(checkpoint))
        except WeftError as error:
            logger.warning("weights do not come from %s: %s", peer.address, error)
            return None

    async def _write(self, checkpoint: Checkpoint, around: ReaderWrapper | None) -> Image:
        self._progress = ReadProgress(0, checkpoint.total_bytes, "")
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(None, write_image, checkpoint, self._report, self._num_readers, around)
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            self._is_stopping = True  # the next piece ends the reading, which removes what it wrote
            await asyncio.wait({reading})
            if reading.exception() is None:
                reading.result().release()
            raise
        finally:
            self._progress = ReadProgress(0, 0, "")

    def _report(self, num_bytes: int, file: str) -> None:
        """On a reading thread."""
        if self._is_stopping:
            raise Cancelled("the weights service is stopping")
        with self._progress_lock:
            now = self._progress
            self._progress = ReadProgress(now.read_bytes + num_bytes, now.total_bytes, file)
