"""Images of a model and its draft head become an engine whose pages hold the KV of both."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.weft.worker.test_startup import arrival, config
from weft.capacity.sizes import choose_sizes
from weft.config import shipped_model
from weft.engine.runner import assemble
from weft.weights.checkpoint import Checkpoint, read_checkpoint
from weft.weights.draft_checkpoint import read_draft
from weft.weights.image import write_image
from weft.worker import startup
from weft.worker.draft_head import drafted_hash
from weft.worker.startup import LoadedEngine, WeightImages
from weft_mesh.v1.weights_service_pb2 import LoadReady

NANO = shipped_model() or Path()


@contextmanager
def served(checkpoint: Checkpoint) -> Iterator[LoadReady]:
    """An image as the weights service announces it."""
    image = write_image(checkpoint, lambda size, file: None, 1)
    try:
        yield LoadReady(
            shm_name=image.name,
            size_bytes=image.size_bytes,
            weights_hash=image.weights_hash,
            config_json=checkpoint.config_json,
        )
    finally:
        image.release()


@pytest.fixture
def images(tmp_path: Path) -> Iterator[WeightImages]:
    """In a directory of their own, after which images are named."""
    model = tmp_path / "nano"
    shutil.copytree(NANO, model, ignore=shutil.ignore_patterns("training.*"))
    source = read_draft("auto", model)
    assert source is not None
    with served(read_checkpoint(model)) as target, served(source.checkpoint) as draft:
        yield WeightImages(target, draft)


def build(images: WeightImages, **settings: str) -> LoadedEngine:
    own = config(MODEL=str(NANO), NUM_BLOCKS="70", MAX_SEQS="4", **settings)
    make = partial(assemble, listener=lambda output: None)
    return startup._build(own, choose_sizes(own.wanted, False), images, make, arrival())


def test_pages_of_a_drafting_engine_hold_both_models(images: WeightImages) -> None:
    assert images.draft is not None
    drafting, plain = build(images), build(WeightImages(images.model))
    assert drafting.engine_config.has_draft_layer
    assert not plain.engine_config.has_draft_layer
    target, head = images.model.weights_hash, images.draft.weights_hash
    assert plain.fingerprint.weights_hash == target
    assert drafting.fingerprint.weights_hash == drafted_hash(target, head, (1, 3, 5))
    assert 6 * drafting.fingerprint.block_bytes == 7 * plain.fingerprint.block_bytes
    assert "7xk2x64+v2x64" in drafting.fingerprint.layout


def test_workers_with_other_boundaries_exchange_no_kv(images: WeightImages) -> None:
    found = {build(images, DRAFT_LAYERS=layers).fingerprint for layers in ("", "1,3,5", "0,2,4")}
    assert len(found) == 2
