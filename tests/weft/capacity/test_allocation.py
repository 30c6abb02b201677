"""What the planner counts is what a loaded model and an engine's pool really take, to the byte."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.weft.engine.harness import Driver
from tests.weft.model.test_quantized import FP8, INT4, quantized
from tests.weft.tiny_families import FAMILIES, TinyFamily

from weft.capacity.layout import GPUS, Demand, PipelineStage
from weft.capacity.plan import make_plan
from weft.capacity.sizes import Machine, estimate_budget
from weft.model import loading
from weft.model.decoder import Decoder
from weft.model.kv_layout import kv_groups
from weft.model.sharding import Layout
from weft.model.spec import ModelConfig
from weft_kernels import moe
from weft_kernels.linear import PackedWeight
from weft_kernels.native import native


def one_stage(config: ModelConfig, dtype: str) -> PipelineStage:
    """The plan for a single GPU."""
    return make_plan(config, Layout(), Demand(GPUS["h200"], 1, 64, dtype, block_tokens=4)).stages[0]


def held_bytes(thing: object, seen: dict[int, int]) -> int:
    """Of all tensors that an object holds on to, in slots of its bases too, each memory once. A CPU's panels count
    without their padding, which is most of a tiny matrix."""
    if isinstance(thing, PackedWeight) and thing.library is not None:
        assert isinstance(thing.data, torch.Tensor)
        seen[thing.data.data_ptr()] = thing.num_outputs * thing.num_inputs * thing.data.itemsize
    elif isinstance(thing, torch.Tensor):
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
    driver = Driver(tiny, dtype, num_blocks=5 * len(groups.spans), block_tokens=4)  # below all windows
    memory = driver.engine.pool_memory
    stage = one_stage(tiny.config, dtype)
    assert memory.block_bytes == stage.page
    assert memory.block_bytes * memory.num_blocks == 5 * stage.kv_bytes_per_sequence(4)


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
    assert held_bytes(model, {}) == planned + rotation_bytes(model)


def rotation_bytes(model: Decoder) -> int:
    """Return the bytes of rotary frequencies and of their factors."""
    tensors = [each for rotation in model.rotations for each in (rotation.frequencies, rotation.factor)]
    return sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))


def in_dtype(tiny: TinyFamily, dtype: str) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """The checkpoint as if its plain tensors had been saved so; factors stay what they are."""
    wanted: torch.dtype = getattr(torch, dtype)
    plain = {name: each for name, each in tiny.weights.items() if each.dtype == torch.float32}
    changed = {name: each.to(wanted) for name, each in plain.items() if not name.endswith("_scale_inv")}
    return replace(tiny.config, dtype=dtype), {**tiny.weights, **changed}


def check_cpu(tiny: TinyFamily) -> None:
    """Whatever it was saved in, and is computed in."""
    if native() is None:
        pytest.skip("without kernels of our own, matrices are plain and in the dtype that they are computed in")
    for stored, dtype in itertools.product(("float32", "bfloat16", "float16"), ("float32", "bfloat16")):
        config, weights = in_dtype(tiny, stored)
        model = Decoder(config, weights, getattr(torch, dtype), torch.device("cpu"))
        planned = estimate_budget(config, Machine("cpu", dtype, 16), 64, 8, 1 << 40).weights
        assert held_bytes(model, {}) == planned + rotation_bytes(model), f"{stored}, computed in {dtype}"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_worker_on_a_cpu_holds_what_is_counted(name: str, family_of: Callable[[str], TinyFamily]) -> None:
    check_cpu(family_of(name))


MIXED = FP8 | {"modules_to_not_convert": ["k_proj", "up_proj"]}


@pytest.mark.parametrize(
    ("name", "fields"),
    [("deepseek", FP8), ("kimi-k2", INT4), ("qwen3-moe", FP8), ("llama3", MIXED), ("qwen3-moe", MIXED)],
)
def test_a_worker_on_a_cpu_holds_what_is_counted_of_packed_checkpoints(
    name: str, fields: dict[str, object], family_of: Callable[[str], TinyFamily], tmp_path: Path
) -> None:
    check_cpu(quantized(family_of(name), fields, tmp_path / "packed"))


@pytest.mark.parametrize("name", ["llama2", "qwen3-moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_weights_beside_plain_ones_are_counted_unpacked_on_a_gpu(
    name: str, dtype: str, family_of: Callable[[str], TinyFamily], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries are packed and keys are not, gates are and what they multiply is not: of what is one matrix here."""
    tiny = quantized(family_of(name), MIXED, tmp_path / "packed")
    monkeypatch.setattr("weft_kernels.linear.native", lambda: None)
    monkeypatch.setattr(loading.Loader, "matrix", loading.Loader.tensor)
    for module in (loading, moe):
        monkeypatch.setattr(module, "on_device", lambda weight, dtype, is_resident: weight)
    model = Decoder(tiny.config, tiny.weights, getattr(torch, dtype), torch.device("cpu"))
    planned = estimate_budget(tiny.config, Machine("cuda", dtype, 16), 64, 8, 1 << 40).weights
    assert held_bytes(model, {}) == planned + rotation_bytes(model)


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
    plain = estimate_budget(tiny.config, Machine("cpu", "float32", 16), 64, 8, 1 << 40).weights
    assert held_bytes(model, {}) - rotation_bytes(model) == plain
    for module in (loading, moe):
        monkeypatch.setattr(module, "on_device", lambda weight, dtype, is_resident: weight)
    model = Decoder(tiny.config, tiny.weights, torch.float32, torch.device("cpu"))
    packed = held_bytes(model, {}) - rotation_bytes(model)
    planned = estimate_budget(tiny.config, Machine("cuda", "float32", 16), 64, 8, 1 << 40).weights
    assert planned == one_stage(tiny.config, "float32").weights
    # 16 rows of a block do not divide these tiny matrices, and what is put together of them has smaller blocks
    assert planned == packed if fields is INT4 else planned <= packed < 1.15 * planned
    assert packed < 0.7 * plain
