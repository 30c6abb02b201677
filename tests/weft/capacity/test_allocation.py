"""What the planner counts is what a loaded model and an engine's pool really take, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.weft.engine.harness import Driver
from tests.weft.model.test_quantized import FP8, INT4, quantized
from tests.weft.tiny_families import FAMILIES, TinyFamily

from weft.capacity.gpus import GPUS
from weft.capacity.layout import Demand, Layout, Stage
from weft.capacity.plan import make_plan
from weft.capacity.room import Machine, measure_room
from weft.model import loading
from weft.model.decoder import Decoder
from weft.model.kv_layout import kv_groups
from weft.model.spec import ModelConfig
from weft_kernels.moe import experts


def one_stage(config: ModelConfig, dtype: str) -> Stage:
    """The plan for a single GPU."""
    return make_plan(config, Layout(), Demand(GPUS["h200"], 1, 64, dtype, block_tokens=4)).stages[0]


def held_bytes(thing: object, seen: dict[int, int]) -> int:
    """Of all tensors that an object holds on to, in slots of its bases too, each memory once."""
    if isinstance(thing, torch.Tensor):
        seen[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    elif isinstance(thing, list | tuple):
        for each in thing:
            held_bytes(each, seen)
    elif type(thing).__module__.startswith("weft"):
        slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        names = slots or vars(thing)
        for name in names:
            held_bytes(getattr(thing, name), seen)
    return sum(seen.values())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engines_pool_is_what_the_plan_says(name: str, dtype: str, family_of: Callable[[str], TinyFamily]) -> None:
    tiny = family_of(name)
    groups = kv_groups(tiny.config)
    driver = Driver(tiny, dtype, num_blocks=5 * len(groups.reaches), block_tokens=4)  # below all windows
    memory = driver.engine.pool_memory
    stage = one_stage(tiny.config, dtype)
    assert memory.block_bytes == stage.page
    assert memory.block_bytes * memory.num_blocks == 5 * stage.sequence(4)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_loaded_model_holds_what_the_plan_says(
    name: str, family_of: Callable[[str], TinyFamily], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In plain matrices, as on a GPU: a CPU's panels are padded. Frequencies are not weights."""
    monkeypatch.setattr("weft_kernels.linear.native", lambda: None)
    tiny = family_of(name)
    model = Decoder(tiny.config, tiny.weights, torch.float32, torch.device("cpu"))
    config = tiny.config
    planned = one_stage(config, "float32").weights
    assert held_bytes(model, {}) == planned + model.frequencies.nbytes


@pytest.mark.parametrize(("name", "fields"), [("deepseek", FP8), ("kimi-k2", INT4), ("qwen3-moe", FP8)])
def test_packed_weights_are_held_unpacked_on_a_cpu_and_packed_on_a_gpu(
    name: str,
    fields: dict[str, object],
    family_of: Callable[[str], TinyFamily],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft_kernels.linear.native", lambda: None)
    tiny = quantized(family_of(name), fields, tmp_path / "packed")
    model = Decoder(tiny.config, tiny.weights, torch.float32, torch.device("cpu"))
    plain = measure_room(tiny.config, Machine("cpu", "float32", 16), 64, 8, 1 << 40).weights
    assert held_bytes(model, {}) - model.frequencies.nbytes == plain
    for module in (loading, experts):
        monkeypatch.setattr(module, "held", lambda weight, dtype, is_resident: weight)
    model = Decoder(tiny.config, tiny.weights, torch.float32, torch.device("cpu"))
    packed = held_bytes(model, {}) - model.frequencies.nbytes
    planned = measure_room(tiny.config, Machine("cuda", "float32", 16), 64, 8, 1 << 40).weights
    assert planned == one_stage(tiny.config, "float32").weights
    # 16 rows of a block do not divide these tiny matrices, and what is put together of them has smaller blocks
    assert planned == packed if fields is INT4 else planned <= packed < 1.15 * planned
    assert packed < 0.7 * plain
