"""Builds an engine from model, pool, runner and thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.executor import DTYPES
from weft.engine.messages import StepOutput
from weft.engine.runner import ModelRunner
from weft.model.config import ModelConfig
from weft.model.decoder import Decoder
from weft_kernels.native import release_threads


def build_engine(
    model_config: ModelConfig,
    weights: Mapping[str, Tensor],
    *,
    dtype: str,
    device: str,
    engine_config: EngineConfig,
    listener: Callable[[StepOutput], None],
    is_resident: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """Build an engine that is not started. dtype: "float32" or "bfloat16", for weights, activations and KV.

    `is_resident`: see `Decoder`. Tensors of another dtype or device are copied; `weights` is not kept.
    Raises BadCheckpoint for missing tensors.
    """
    model = Decoder(model_config, weights, DTYPES[dtype], torch.device(device), is_resident)
    return assemble(model, dtype, engine_config, listener, clock)


def assemble(
    model: Decoder,
    dtype: str,
    config: EngineConfig,
    listener: Callable[[StepOutput], None],
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """Build an engine around a loaded model. This thread must not use the model afterwards."""
    release_threads()
    return Engine(ModelRunner(model, config, dtype, model.device), config, listener, clock)
