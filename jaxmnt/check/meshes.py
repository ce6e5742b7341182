"""The small configs with which a config's parts are compared: on one device, and on meshes of several."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxmnt.config.load import parse_config
from jaxmnt.config.schema import Config
from jaxmnt.config.small import small_model
from jaxmnt.models.registry import family_class

_LENGTH = 32
_ROWS_PER_DEVICE = 2
_EXPERTS = 8


class Trial(NamedTuple):
    """A mesh, and the config for it."""

    name: str
    config: Config
    devices: int


def trials(config: Config, devices: int) -> list[Trial]:
    """Returns one device, and then the meshes of up to `devices` devices. Model, rows and settings are the same on
    all."""
    half = devices // 2
    meshes: list[Mapping[str, Any]] = [
        {"fsdp": devices},
        {"fsdp": half, "model": 2},
        {"data": half, "model": 2, "zero": 1},
        {"pipeline": 2, "fsdp": max(1, devices // 4), "model": 2 if devices >= 4 else 1},
        {"context": 2, "fsdp": half},
    ]
    if config.model.num_experts is not None:
        meshes += [{"expert": 2, "fsdp": half}]
    small = _small_config(config, devices)
    results = [Trial("one device", parse_config(small | {"mesh": {"data": 1}}), 1)]
    for mesh in meshes:
        sizes = {axis: size for axis, size in mesh.items() if axis != "zero" and size > 1}
        name = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
        tree = small | {"mesh": {"data": 1} | dict(mesh) | {"allow_split_hosts": True}}
        if "pipeline" in sizes:
            tree["train"] = tree["train"] | {"microbatch_size": 1}
        name += f", ZeRO {mesh['zero']}" if "zero" in mesh else ""
        results.append(Trial(name, parse_config(tree), math.prod(sizes.values())))
    return results


def _small_config(config: Config, devices: int) -> dict[str, Any]:
    """Returns the settings of a small version of the config, in float32 and without settings of a cluster."""
    model, train = config.model, config.train
    has_patterns = "sliding_window_pattern" in family_class(model.family).settings
    grains = [config.data.grain, *(source.grain for source in config.data.sources.values())]
    has_fixed_rows = any(grain is not None and grain.elements == "rows" for grain in grains)
    small = model.model_dump() | small_model(model, 2, has_patterns=has_patterns)
    if model.num_experts is not None:
        small |= {"num_experts": _EXPERTS, "experts_per_token": 2, "expert_size": small["intermediate_size"] // 4}
    if model.sliding_window is not None:
        small["sliding_window"] = _LENGTH // 4
    return {
        "seed": config.seed,
        "model": small,
        "data": {
            "sequence_length": config.data.sequence_length if has_fixed_rows else _LENGTH,
            "global_batch_size": _ROWS_PER_DEVICE * devices,
            "document_mask": True,
            "fields": config.data.fields,
        },
        "train": {
            "precision": "float32",
            "loss": train.loss,
            "loss_settings": train.loss_settings,
            "z_loss": train.z_loss,
            "steps": 10,
        },
        "optimizer": config.optimizer.model_dump()
        | {"warmup_steps": 0, "offload": False, "average": None}
        | ({} if config.lora is None else {"rules": []}),  # rules of adapters, which are left out
    }
