"""What job scripts and manifests have in common: variables for GPU hosts (docs/cluster.md), setup, slots."""

import re
import shlex

from jaxmnt.cluster.authentication import RUN_KEY
from jaxmnt.config.schema import Config
from jaxmnt.errors import ExitCode

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


def key_needed(flags: list[str]) -> list[str]:
    """Lines of the shell that end it where --fresh would begin the run anew at each restart: only by the key of the
    run, which is one for all its restarts there, does a process know that it is done (runtime/fresh.py)."""
    if "--fresh" not in flags:
        return []
    text = (
        f"jaxmnt: --fresh: there is no {RUN_KEY} here, by which a restart knows that the run was begun anew; "
        "hand it to the processes (docs/cluster.md), or launch without --fresh"
    )
    return [f'[ -n "${RUN_KEY}" ] || {{ echo {shlex.quote(text)} >&2; exit {int(ExitCode.CONFIG)}; }}']


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
