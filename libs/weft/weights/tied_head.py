"""The output matrix of a model that is tied in config.json although the files hold a separate one.

transformers then uses the files, and so does Weft. Both matrices are compared whole, because training may have changed
only a few rows.
"""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from weft.errors import BadCheckpoint
from weft.model.quantization import FLOATS
from weft.weights.checkpoint import Checkpoint, TensorSource, source_id, while_unchanged
from weft.weights.formats import PieceRun, ReadBuffers, TensorPiece
from weft.weights.image import find_image
from weft.weights.load import ImageLayout, files_reader, num_pieces

logger = logging.getLogger(__name__)


def resolve_tied_head(checkpoint: Checkpoint, num_threads: int) -> Checkpoint:
    """Return the checkpoint with its separate output matrix and a matching config.

    Returns it unchanged if there is no such matrix or if it equals the embedding. Raises BadCheckpoint,
    StorageUnavailable.
    """
    head = checkpoint.untied_head
    if head is None:
        return checkpoint
    _, own = both = possible_checkpoints(checkpoint)
    for each in both:
        if (image := find_image(each)) is not None:  # the writer of the image has compared them
            image.close()
            return each
    embedding = next(each for each in checkpoint.tensors if each.entry.name.endswith("embed_tokens.weight"))
    if head.entry.shape != embedding.entry.shape or head.entry.dtype not in FLOATS:
        raise BadCheckpoint(f"{head.file}: tensor {head.entry.name} is not a matrix of the embedding's shape")
    with while_unchanged(checkpoint):
        is_same = head.entry.dtype == embedding.entry.dtype and _are_equal(embedding, head, num_threads)
    if is_same:
        return checkpoint
    logger.warning("%s is used: it is not the embedding, to which config.json ties it", head.entry.name)
    return own


def possible_checkpoints(checkpoint: Checkpoint) -> tuple[Checkpoint, ...]:
    """Return the checkpoints that an image of these files may hold: tied as in config.json, or with its own head.

    Raises BadCheckpoint, StorageUnavailable.
    """
    head = checkpoint.untied_head
    return (checkpoint,) if head is None else (checkpoint, _untied(checkpoint, head))


def _untied(checkpoint: Checkpoint, head: TensorSource) -> Checkpoint:
    fields = json.loads(checkpoint.config_json)
    for part in (fields, fields.get("text_config") or {}):
        part["tie_word_embeddings"] = False
    tensors = (*checkpoint.tensors, head)
    state = source_id(checkpoint.directory, tensors)
    return replace(checkpoint, config_json=json.dumps(fields), tensors=tensors, source_id=state, untied_head=None)


def _are_equal(one: TensorSource, other: TensorSource, num_threads: int) -> bool:
    local = threading.local()
    with files_reader(ImageLayout((one, other), 0, 0)) as read, ThreadPoolExecutor(num_threads) as threads:

        def is_equal(number: int) -> bool:
            if not hasattr(local, "memories"):
                local.memories = ReadBuffers(), ReadBuffers()
            runs = (PieceRun(source.file, 0, (TensorPiece.of(source.entry, number),)) for source in (one, other))
            first, second = (read(run, memory) for run, memory in zip(runs, local.memories, strict=True))
            return first == second

        equal = all(threads.map(is_equal, range(num_pieces(one.entry))))
        threads.shutdown(cancel_futures=True)
        return equal
