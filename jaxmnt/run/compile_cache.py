"""The folder of compiled programs. What is in it is executed, so nobody else may write to it.

Each entry begins with a seal, the SHA-256 of its key and its content: JAX would run whatever stands under a name, and
never write an entry again whose file is there, whatever it holds.
"""

import functools
import hashlib
import os
import platform
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmnt.errors import ConfigError, remark

_SEALED = "-sealed"
"""At the end of our keys, so that another program that uses the same folder reads none of our entries."""
_OTHERS_MAY_WRITE = 0o022
_FOLDER = "compiled"
_CPU_LINES = {"vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part"}
"""Lines of /proc/cpuinfo that say which instructions there are."""


def use_compile_cache(folder: str | None, run_dir: Path) -> None:
    """Keeps compiled programs, and on GPUs what XLA found by trying kernels, in `folder`, which is made private if it
    is not there, whatever the umask. The default is the folder that JAX's own variable names, else on GPUs one in
    `run_dir`: a restart that tried kernels anew might choose others, whose last digits differ. On CPUs it is one in the
    user's cache, for this kind of CPU alone: another's programs may hold instructions that this one does not have.
    Programs of several CPU devices are not kept.

    Raises `ConfigError` if it is somebody else's, or if its group or all may write to it.
    """
    keep_programs_of_one_cpu_alone()
    on_cpu, told = jax.default_backend() == "cpu", _told_to_jax()
    ours = folder or (None if told else _cpu_folder() if on_cpu else str(run_dir / _FOLDER))
    chosen = ours or told
    if chosen is None or "://" in chosen:
        return
    path = Path(chosen)
    key = "run.compile_cache" if ours else "JAX_COMPILATION_CACHE_DIR"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        if not folder and ours:
            remark(f"note: compiled programs are not kept: {path} cannot be used: {error.strerror}")
            return
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
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@functools.cache
def keep_programs_of_one_cpu_alone() -> None:
    """Programs of several CPU devices are compiled at every start, also where JAX's own variable names a folder.

    XLA runs independent operations at once, and keeps collectives in order by an object that they share. Read from a
    file, each collective has an object of its own: two devices may begin two of them in different orders, and wait for
    each other without end. Found in jax 0.10.2 and in 0.12.0.1; on GPUs the order is that of a stream.
    """
    compiler: Any = import_module("jax._src.compiler")
    key_of = compiler._get_cache_key

    def key_of_one_device(*arguments: Any, devices: np.ndarray, **named: Any) -> str | None:
        if devices.size > 1 and devices.flat[0].platform == "cpu":
            return None
        key: str | None = key_of(*arguments, devices=devices, **named)
        return None if key is None else key + _SEALED

    compiler._get_cache_key = key_of_one_device
    _seal_entries(import_module("jax._src.lru_cache"))


def _seal_entries(module: Any) -> None:
    """Has JAX's cache seal what it writes under our keys. An entry whose seal does not fit is named, removed and made
    again: it is empty, damaged, or that of another program."""
    get, put = module.LRUCache.get, module.LRUCache.put

    def get_sealed(cache: Any, key: str) -> bytes | None:
        entry: bytes | None = get(cache, key)
        if entry is None or not key.endswith(_SEALED):
            return entry
        seal, content = entry[: hashlib.sha256().digest_size], entry[hashlib.sha256().digest_size :]
        if seal == _seal(key, content):
            return content
        path = cache.path / f"{key}{module._CACHE_SUFFIX}"
        told = "it is removed, and the program compiled again"
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            told = f"it cannot be removed ({error.strerror}), so the program is compiled again at each start"
        remark(f"note: {path} in the compile cache is damaged, or the entry of another program: {told}")
        return None

    def put_sealed(cache: Any, key: str, value: bytes) -> None:
        put(cache, key, _seal(key, value) + value if key.endswith(_SEALED) else value)

    module.LRUCache.get, module.LRUCache.put = get_sealed, put_sealed


def _seal(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + content).digest()


def _cpu_folder() -> str | None:
    """A folder whose name holds what compiled programs of a CPU depend on; None for a user without a home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    with suppress(RuntimeError):  # there is no home to put in place of ~
        cache = cache.expanduser()
    if not cache.is_absolute():
        return None
    try:
        about = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:  # not Linux
        about = ""
    kept = [line for line in about.splitlines() if line.partition("\t")[0] in _CPU_LINES] or [platform.platform()]
    name = "\n".join([*kept, platform.machine(), *(version(package) for package in ("jax", "jaxlib"))])
    return str(cache / "jaxmnt" / f"{_FOLDER}-{hashlib.sha256(name.encode()).hexdigest()[:12]}")


def _told_to_jax() -> str | None:
    folder: str | None = jax.config.values["jax_compilation_cache_dir"]
    return folder
