"""Starts the ranks of a worker: checks that they can divide the model, deals out cores, and orders each to load."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.capacity.host_limits import granted_cores
from weft.capacity.sizes import Machine
from weft.errors import ConfigError
from weft.model.sharding import BadPlan, check_cuts, layout_problem
from weft.model.spec import ModelConfig
from weft.options import parse_cpus
from weft.worker.config import WorkerConfig
from weft.worker.follower import FollowerOrder
from weft.worker.group import Group, start_group
from weft.worker.os_tuning import pin_to_cpus
from weft_mesh.v1 import weights_service_pb2


def take_cores(config: WorkerConfig) -> None:
    """Pin this process to its CPUs and set its threads; the ranks of a group share those of the worker."""
    size, cpus = config.layout.stage_gpus, rank_cpus(config, 0)
    num_cores = pin_to_cpus(cpus) * size if cpus else torch.get_num_threads()
    torch.set_num_threads(max(1, (config.threads or min(num_cores, granted_cores() or num_cores)) // size))


def rank_cpus(config: WorkerConfig, place: int) -> str:
    """Return WEFT_CPUS of one rank: an equal part for each; empty if there is not a core for each."""
    size = config.layout.stage_gpus
    if not config.cpus or size == 1:
        return config.cpus
    cpus = sorted(parse_cpus(config.cpus))
    count = len(cpus) // size
    return ",".join(map(str, cpus[place * count : (place + 1) * count]))


def check_group(config: WorkerConfig, device: str, model: ModelConfig) -> None:
    """Raise ConfigError or BadPlan if the ranks of WEFT_TP and WEFT_EP cannot divide the model here."""
    layout = config.layout
    if layout.stage_gpus == 1:
        return
    if device != "cpu":
        raise ConfigError(f"WEFT_TP={layout.tp}: several ranks run on CPUs only; set WEFT_TP=1 or hide the GPUs")
    if problem := layout_problem(model, layout):
        raise BadPlan(problem)
    check_cuts(model, layout)


def start_followers(
    config: WorkerConfig,
    machine: Machine,
    image: weights_service_pb2.LoadReady,
    model: ModelConfig,
    clock: Callable[[], float],
) -> Group | None:
    """Start the other ranks of this worker, which load the image at once; None if there are none.

    `model`: its config with the dtype of the files. Call it on the main thread. Raises BadPlan, ConfigError,
    EngineFailed.
    """
    if config.layout.stage_gpus == 1:
        return None
    check_group(config, machine.device, model)

    def order(place: int) -> FollowerOrder:
        return FollowerOrder(
            worker_id=config.worker_id,
            layout=(config.layout.tp, config.layout.pp, config.layout.ep),
            place=place,
            image=image.shm_name,
            image_bytes=image.size_bytes,
            config_json=image.config_json,
            dtype=machine.dtype,
            stored_dtype=model.dtype,
            is_resident=machine.is_resident,
            threads=torch.get_num_threads(),
            cpus=rank_cpus(config, place),
            niceness=config.niceness,
        )

    return start_group(config.layout, order, clock)
