"""Sets the variables that XLA, JAX and NCCL read before a process uses GPUs, and checks that XLA accepts them.

Each process sets them itself, whatever has started it. Variables that are already set take precedence. XLA aborts a
process, without an exception, for a flag that this jaxlib does not know, so a child process tries the flags first.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from importlib import import_module

from jaxmnt.config.schema import Config
from jaxmnt.distributed.local_gpus import default_to_cpu, gpus_here, visible_gpus
from jaxmnt.errors import ConfigError, printable

FLAGS = "XLA_FLAGS"
MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
JAX_MEMORY_FRACTION, OUR_MEMORY_FRACTION = 0.75, 0.92
"""Default fraction of a GPU's memory that a process reserves: JAX's, and the one set here."""

SHOWN_VARIABLES = (FLAGS, "JAX_PLATFORMS", MEMORY_FRACTION, "NCCL_DEBUG")
"""Variables that a run shows, because they change what it does on its devices."""

_NCCL_TIMEOUT = "--xla_gpu_nccl_termination_timeout_seconds"
_CHILD_TIMEOUT_SECONDS = 60.0

SUCCESSORS: dict[str, str | None] = {
    "xla_gpu_graph_level": "xla_gpu_enable_command_buffer",
    "xla_gpu_cudnn_gemm_fusion": "xla_gpu_cudnn_gemm_fusion_level",
    "xla_gpu_executable_terminate_timeout_seconds": "xla_gpu_executable_terminate_timeout",
    "xla_gpu_executable_warn_stuck_timeout_seconds": "xla_gpu_executable_warn_stuck_timeout",
    "xla_gpu_enable_address_computation_fusion": "xla_gpu_enable_dynamic_slice_fusion",
    "xla_gpu_experimental_autotuner_cache_dir": "xla_gpu_per_fusion_autotune_cache_dir",
    **dict.fromkeys(
        (
            "xla_gpu_enable_async_all_gather",
            "xla_gpu_enable_async_all_reduce",
            "xla_gpu_enable_async_collectives",
            "xla_gpu_enable_custom_fusions",
            "xla_gpu_enable_nccl_per_stream_comms",
            "xla_gpu_enable_triton_softmax_fusion",
            "xla_gpu_lhs_enable_gpu_async_tracker",
            "xla_gpu_experimental_enable_nvshmem",
            "xla_gpu_experimental_aot_compiled_thunks",
            "xla_gpu_experimental_ragged_all_to_all_use_barrier",
            "xla_gpu_experimental_ragged_all_to_all_zero_copy",
            "xla_gpu_experimental_use_raft_select_k",
            "xla_gpu_enable_llvm_module_compilation_parallelism",
            "xla_gpu_fused_attention_use_cudnn_rng",
            "xla_gpu_use_inprocess_lld",
        )
    ),
}
"""Flags of recipes that newer versions of XLA no longer have, and their replacements. None means that XLA now does
the same without a flag, or no longer does it."""


def prepare(config: Config, environment: MutableMapping[str, str] = os.environ, gpus: int | None = None) -> None:
    """Completes the environment of this process, before JAX is imported, and checks it.

    `gpus` is the number of GPUs that the process sees; None counts them. Without GPUs, or with `launch.settings: none`,
    no variable other than JAX_PLATFORMS=cpu is set. Raises `ConfigError` for flags that would abort the process, and
    for values that JAX does not accept.
    """
    gpus = len(visible_gpus(environment, gpus_here())) if gpus is None else gpus
    if not gpus:
        default_to_cpu(environment)
    if gpus and config.launch.settings == "auto":
        environment.update(_gpu_variables(config, environment))
    check_flags(environment)
    try:
        import_module("jax")  # JAX reads its own variables now
    except ValueError as error:
        raise ConfigError(f"environment: JAX does not accept a variable: {error}; correct or unset it") from error


def _gpu_variables(config: Config, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to set. Values that are already in the environment take precedence."""
    flags = environment.get(FLAGS, "")
    if _NCCL_TIMEOUT not in flags:
        # Without this flag, a collective that stalls in its kernel hangs for ever. Our own timeouts are shorter, and
        # name the process at fault.
        flags = f"{flags} {_NCCL_TIMEOUT}={config.nccl_timeout_seconds:.0f}".strip()
    return {
        # By default JAX leaves a quarter of a GPU's memory to other programs; a run has the GPU to itself.
        MEMORY_FRACTION: environment.get(MEMORY_FRACTION, str(OUR_MEMORY_FRACTION)),
        # NCCL's warnings name the link or interface that has a problem.
        "NCCL_DEBUG": environment.get("NCCL_DEBUG", "WARN"),
        FLAGS: flags,
    }


def check_flags(environment: Mapping[str, str]) -> None:
    """Raises `ConfigError` if XLA_FLAGS would abort the process, with the replacement of each unknown flag."""
    flags = environment.get(FLAGS, "").strip()
    if not flags:
        return
    child = subprocess.run(
        [sys.executable, "-c", "from jaxlib import xla_client; xla_client.CompileOptions()"],
        env=dict(environment),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_CHILD_TIMEOUT_SECONDS,
    )
    if child.returncode == 0:
        return
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", child.stderr)
    if unknown is None:
        raise ConfigError(
            f"{FLAGS}: XLA does not accept {printable(flags)}: {_error_line(child.stderr)}; correct or unset it"
        )
    names = [flag.removeprefix("--").split("=")[0] for flag in unknown.group(1).split()]
    advice = "; ".join(f"--{printable(name)} {_replacement(name)}" for name in names)
    raise ConfigError(f"{FLAGS}: this jaxlib does not know {advice}")


def _replacement(name: str) -> str:
    if name not in SUCCESSORS:
        return "(remove it, or correct its name)"
    successor = SUCCESSORS[name]
    return f"(set --{successor} instead)" if successor else "(remove it: XLA no longer has or needs it)"


def _error_line(text: str) -> str:
    """Returns the line of a child's stderr that describes the error, without the prefix of the log."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("WARNING", "I0"))]
    errors = [line for line in lines if re.match(r"[FE]\d{4} ", line) or "Error" in line]
    line = (errors or lines or ["it says nothing"])[0]
    return printable(re.sub(r"^[FE]\d{4} [\d:.]+\s+\d+ [\w.]+:\d+\] ", "", line))[:200]
