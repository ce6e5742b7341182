"""The folder of compiled programs. What is in it is executed, so nobody else may write to it."""

import os
from pathlib import Path

import jax

from jaxmnt.errors import ConfigError, remark

_OTHERS_MAY_WRITE = 0o022
_FOLDER = "compiled"


def use_compile_cache(folder: str | None, run_dir: Path) -> None:
    """Keeps compiled programs, and on GPUs what XLA found by trying kernels, in `folder`, which is made private if it
    is not there, whatever the umask. The default is the folder that JAX's own variable names, else, on GPUs, one in
    `run_dir`: a restart that tried kernels anew might choose others, whose last digits differ.

    Raises `ConfigError` if it is somebody else's, or if its group or all may write to it.
    """
    told = _told_to_jax()
    ours = folder or (None if told or jax.default_backend() == "cpu" else str(run_dir / _FOLDER))
    chosen = ours or told
    if chosen is None or "://" in chosen:
        return
    path = Path(chosen)
    key = "run.compile_cache" if ours else "JAX_COMPILATION_CACHE_DIR"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be used: {error.strerror}; choose another folder") from error
    if status.st_mode & _OTHERS_MAY_WRITE or status.st_uid not in (os.getuid(), 0):
        if not folder and ours:
            remark(f"note: compiled programs are not kept: others can write to {path}")
            return
        raise ConfigError(
            f"{key}: others can write to {path}, and what is in it is executed; "
            f"run chmod go-w on it if it is yours, or choose another folder"
        )
    if ours is not None:
        jax.config.update("jax_compilation_cache_dir", str(path.absolute()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def _told_to_jax() -> str | None:
    folder: str | None = jax.config.values["jax_compilation_cache_dir"]
    return folder
