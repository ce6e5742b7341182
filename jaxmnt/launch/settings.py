"""What job scripts and manifests have in common: variables for GPU hosts (docs/cluster.md), setup, slots."""

import re
import shlex

from jaxmnt.config.schema import Config

_GPU_HOSTS = {
    # Collectives and products overlap, pipelined over layers: XLA's own bundle of flags for that.
    "JAX_OPTIMIZATION_LEVEL": "O1",
    # JAX takes three quarters of a GPU's memory unless it is told that nobody else wants any.
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
    # Warnings of NCCL say which link or interface they are about.
    "NCCL_DEBUG": "WARN",
}


def checked(setup: list[str]) -> list[str]:
    """Lines of the shell that end it when one of the given ones fails."""
    return [f"eval {shlex.quote(line)} || exit 1" for line in setup]


def filled(template: str, **values: str) -> str:
    """With `@name@` replaced by a value: what else there is belongs to the shell."""
    return re.sub(r"@(\w+)@", lambda slot: values[slot[1]], template)


def environment(config: Config) -> dict[str, str]:
    """What the launchers write into scripts and manifests, sorted by name."""
    launch = config.launch
    preset = _GPU_HOSTS if launch.settings == "auto" and launch.gpus_per_node and launch.nodes > 1 else {}
    more = {"JAXMNT_IMAGE": launch.image} if launch.image else {}
    if launch.gpus_per_node:
        more["JAX_PLATFORMS"] = "cuda,cpu"  # a host whose GPUs are not found must not train on its CPU
    return dict(sorted((preset | more | launch.environment).items()))
