"""The folder of compiled programs. What is in it is executed, so nobody else may write to it."""

import os
from pathlib import Path

import jax

from jaxmnt.errors import ConfigError

_OTHERS_MAY_WRITE = 0o022


def use_compile_cache(folder: str | None) -> None:
    """Keeps compiled programs in `folder`, which is made private if it is not there, whatever the umask.

    Raises `ConfigError` if it is somebody else's, or if its group or all may write to it; for the folder that JAX's
    own variable names, too.
    """
    chosen = folder or jax.config.values["jax_compilation_cache_dir"]
    if chosen is None or "://" in chosen:
        return
    path = Path(chosen)
    key = "run.compile_cache" if folder else "JAX_COMPILATION_CACHE_DIR"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be used: {error.strerror}; choose another folder") from error
    if status.st_mode & _OTHERS_MAY_WRITE or status.st_uid not in (os.getuid(), 0):
        raise ConfigError(
            f"{key}: others can write to {path}, and what is in it is executed; "
            f"run chmod go-w on it if it is yours, or choose another folder"
        )
    if folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(path.absolute()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
