"""Brings a model into shared memory: finds an existing image, or reads the checkpoint once for all callers."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from weft.errors import BadCheckpoint, Cancelled, Incompatible, PeerLost, StorageUnavailable, WeftError
from weft.file_io import os_errors_translated, to_weft_error
from weft.weights.checkpoint import Checkpoint, files_state, read_checkpoint
from weft.weights.formats import RunReader
from weft.weights.image import Image, ReaderWrapper, find_image, is_mapped, remove_stale, write_image
from weft.weights.load import PeerFirstReader, check_samples, image_layout
from weft.weights.tied_head import possible_checkpoints, resolve_tied_head
from weft_services.weights.peers import PeerImage, WeightsPeer
from weft_services.weights.shm_budget import ShmBudget

logger = logging.getLogger(__name__)
PROGRESS_SECONDS = 0.1
FILES, MEMORY = "files", "memory"


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """Bytes of the checkpoint read so far."""

    read_bytes: int
    total_bytes: int
    file: str


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """A model in shared memory."""

    image: Image
    config_json: str
    source: str

    @property
    def read_from_disk(self) -> bool:
        """Whether this service read the checkpoint's files for it."""
        return self.source == FILES


class WeightLoader:
    """Loads one model of one node. `tasks` outlives every load: a caller that leaves does not end the reading for
    others.

    It asks `peer` first, if there is one, and reads the rest from the checkpoint's files.
    """

    def __init__(
        self,
        directory: Path,
        num_readers: int,
        tasks: asyncio.TaskGroup,
        peer: WeightsPeer | None = None,
        room: ShmBudget | None = None,
        read: Callable[[Path], Checkpoint] = read_checkpoint,
    ) -> None:
        """`read`: reads the headers of what this loader loads from the directory."""
        self.name = directory.name
        self._budget = room or ShmBudget()
        self._budget.register(self)
        self._directory = directory
        self._read_headers = read
        self._num_readers = num_readers
        self._peer = peer
        self._tasks = tasks
        self._loaded: LoadedWeights | None = None
        self._loading: asyncio.Task[LoadedWeights | WeftError] | None = None
        self._progress = ReadProgress(0, 0, "")
        self._progress_lock = threading.Lock()
        self._is_stopping = False
        self._is_wanted = False
        self._state: str | None = None  # state of the files at the last failed read; None after a success

    async def load(self, is_ahead: bool = False) -> AsyncIterator[ReadProgress | LoadedWeights]:
        """Yield progress, and LoadedWeights last; `is_ahead`: no worker waits to map the image.

        Raises BadCheckpoint, StorageUnavailable, or Overloaded if shared memory is full.
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
        """The image that this loader holds."""
        return self._loaded.image if self._loaded else None

    @property
    def read_bytes(self) -> int:
        """Bytes of the files read by the current load."""
        return self._progress.read_bytes

    def drop(self) -> None:
        """Forget the image; the caller releases it."""
        self._loaded = None

    async def close(self) -> None:
        """Cancel a load and stop holding the image; no request may follow.

        An image that workers map stays for the next process: reading it again would take the memory twice.
        """
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.wait({self._loading})
        if (image := self.image) is not None and is_mapped(image.fd):
            logger.info("image left in shared memory for its workers image=%s", image.name)
            self.drop()
            image.close()
        self.release()

    def release(self) -> None:
        """Stop holding the image; the last holder removes it."""
        if (image := self.image) is not None:
            self.drop()
            image.release()

    async def fits(self) -> bool:
        """Return whether the model fits without evicting another model. Raises BadCheckpoint, StorageUnavailable."""
        with os_errors_translated(f"{self._directory}"):
            checkpoint = await asyncio.to_thread(self._read_checkpoint)
            known_by = await asyncio.to_thread(possible_checkpoints, checkpoint)
            found = next(filter(None, map(find_image, known_by)), None)
            if found is None:
                return await self._budget.fits(image_layout(checkpoint).size_bytes)
            try:  # hold it, so that it is not evicted to make room for itself
                return await self._budget.fits(found.size_bytes, is_there=True)
            finally:
                found.close()

    async def _fetch(self) -> LoadedWeights | WeftError:
        """Load the model. Returns errors instead of raising them: in the task group an error would end the process."""
        try:
            checkpoint = await asyncio.to_thread(self._read_checkpoint)
            if checkpoint.unread_files:
                files = sorted({tensor.file.name for tensor in checkpoint.tensors})
                logger.info("weights chosen files=%s unread=%s", ",".join(files), ",".join(checkpoint.unread_files))
            checkpoint = await asyncio.to_thread(resolve_tied_head, checkpoint, self._num_readers)
            for name in await asyncio.to_thread(remove_stale, checkpoint):
                logger.info("removed stale image image=%s", name)
            found = find_image(checkpoint)
            self.release()  # an earlier state of the files
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
            self._budget.touch(self)  # reading may have taken long; the time to map the image starts now
        logger.info(
            "weights from %s image=%s size_bytes=%d hash=%s",
            *(source, image.name, image.size_bytes, image.weights_hash),
        )
        return self._loaded

    async def _admitted(self, found: Image) -> Image:
        try:  # hold it, so that it is not evicted to make room for itself
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
            return self._read_headers(self._directory)
        except BadCheckpoint as error:
            before, self._state = self._state, self._files_state()
            if before is None or before == self._state:
                raise
            raise StorageUnavailable(f"{error}; files are being written") from error

    def _files_state(self) -> str:
        try:
            return files_state(self._directory)
        except (WeftError, OSError):
            return ""  # a file is disappearing, or the disk fails

    async def _read(self, checkpoint: Checkpoint) -> tuple[Image, str]:
        """Return the new image and its source."""
        peer = self._peer
        theirs = await self._describe(peer, checkpoint) if peer else None
        if peer is not None and theirs is not None:
            readers: list[PeerFirstReader] = []

            def around(files: RunReader) -> RunReader:
                """Prefer the peer after comparing samples: the image must match the files that name it."""
                read = peer.reader(theirs)
                check_samples(image_layout(checkpoint), read, files, self._num_readers)
                readers.append(PeerFirstReader(read, theirs.leaves, files))
                return readers[0]

            try:
                image = await self._write(checkpoint, around)
            except Incompatible as error:
                logger.warning(
                    "peer holds other weights peer=%s directory=%s error=%s", peer.address, self._directory, error
                )
            except PeerLost as error:
                logger.warning("peer unusable for weights peer=%s error=%s", peer.address, error)
            else:
                return image, FILES if readers[0].trouble else peer.address
        return await self._write(checkpoint, None), FILES

    async def _describe(self, peer: WeightsPeer, checkpoint: Checkpoint) -> PeerImage | None:
        try:
            return await peer.describe(image_layout(checkpoint))
        except WeftError as error:
            logger.warning("peer unusable for weights peer=%s error=%s", peer.address, error)
            return None

    async def _write(self, checkpoint: Checkpoint, around: ReaderWrapper | None) -> Image:
        self._progress = ReadProgress(0, checkpoint.total_bytes, "")
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(None, write_image, checkpoint, self._report, self._num_readers, around)
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            self._is_stopping = True  # the next report ends the reading, which removes its file
            await asyncio.wait({reading})
            if reading.exception() is None:
                reading.result().release()
            raise
        finally:
            self._progress = ReadProgress(0, 0, "")

    def _report(self, num_bytes: int, file: str) -> None:
        """Count progress; called on reading threads."""
        if self._is_stopping:
            raise Cancelled("the weights service is stopping")
        with self._progress_lock:
            now = self._progress
            self._progress = ReadProgress(now.read_bytes + num_bytes, now.total_bytes, file)
