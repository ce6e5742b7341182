"""The folder of compiled programs. Its content is executed, so no other user may write to it.

Each entry begins with a seal, the SHA-256 of its key and its content. Without a seal JAX would execute whatever the
entry's file contains, and would never replace a damaged entry.
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

_SEALED_SUFFIX = "-sealed"
"""Suffix of our keys. It prevents other programs that share the folder from reading our entries."""
_GROUP_OR_OTHERS_MAY_WRITE = 0o022
_FOLDER = "compiled"
_CPU_LINES = {"vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part"}
"""Lines of /proc/cpuinfo that identify the instruction set."""


def use_compile_cache(folder: str | None, run_dir: Path) -> None:
    """Keeps compiled programs, and on GPUs XLA's autotuning results, in a folder.

    The folder is `folder`; if that is None, the one that JAX's own variable names. If neither is set, it is a folder in
    `run_dir` on GPUs, because a restart that autotunes again may choose other kernels, whose results differ in the last
    digits. On CPUs it is then a folder in the user's cache for this kind of CPU only, because programs compiled for
    another kind may use instructions that this one lacks. Programs for several CPU devices are not cached.

    A new folder is private, whatever the umask. Raises `ConfigError` if the folder belongs to another user, or if its
    group or all users may write to it.
    """
    cache_single_cpu_programs_only()
    on_cpu = jax.default_backend() == "cpu"
    jax_folder = _jax_cache_folder()
    own_folder = folder or None
    if not own_folder and not jax_folder:
        own_folder = _cpu_cache_folder() if on_cpu else str(run_dir / _FOLDER)
    cache_folder = own_folder or jax_folder
    if cache_folder is None or "://" in cache_folder:
        return
    path = Path(cache_folder)
    key = "run.compile_cache" if own_folder else "JAX_COMPILATION_CACHE_DIR"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        if not folder and own_folder:
            remark(f"note: compiled programs are not kept: {path} cannot be used: {error.strerror}")
            return
        raise ConfigError(f"{key}: {path} cannot be used: {error.strerror}; choose another folder") from error
    if status.st_mode & _GROUP_OR_OTHERS_MAY_WRITE or status.st_uid not in (os.getuid(), 0):
        if not folder and own_folder:
            remark(f"note: compiled programs are not kept: others can write to {path}")
            return
        raise ConfigError(
            f"{key}: others can write to {path}, and its content is executed; "
            f"run chmod go-w on it if it is yours, or choose another folder"
        )
    if own_folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(path.absolute()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@functools.cache
def cache_single_cpu_programs_only() -> None:
    """Excludes programs for several CPU devices from the compile cache, even in the folder that JAX's variable names.

    XLA runs independent operations concurrently, and orders collectives by an object that they share. In a program
    read from a file, each collective has its own object, so two devices may start two collectives in different orders
    and wait for each other forever. This happens in jax 0.10.2 and 0.12.0.1. On GPUs a stream orders the collectives.
    """
    compiler: Any = import_module("jax._src.compiler")
    key_of = compiler._get_cache_key

    def sealed_key(*arguments: Any, devices: np.ndarray, **options: Any) -> str | None:
        if devices.size > 1 and devices.flat[0].platform == "cpu":
            return None  # JAX does not cache a program without a key
        key: str | None = key_of(*arguments, devices=devices, **options)
        return None if key is None else key + _SEALED_SUFFIX

    compiler._get_cache_key = sealed_key
    _seal_entries(import_module("jax._src.lru_cache"))


def _seal_entries(module: Any) -> None:
    """Makes JAX's cache seal the entries under our keys.

    An entry whose seal does not match is empty or damaged, or belongs to another program. It is reported, removed and
    replaced.
    """
    get, put = module.LRUCache.get, module.LRUCache.put

    def get_sealed(cache: Any, key: str) -> bytes | None:
        entry: bytes | None = get(cache, key)
        if entry is None or not key.endswith(_SEALED_SUFFIX):
            return entry
        seal_bytes = hashlib.sha256().digest_size
        seal, content = entry[:seal_bytes], entry[seal_bytes:]
        if seal == _seal(key, content):
            return content
        path = cache.path / f"{key}{module._CACHE_SUFFIX}"
        consequence = "it is removed, and the program is compiled again"
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            consequence = f"it cannot be removed ({error.strerror}), so the program is compiled again at each start"
        remark(f"note: {path} in the compile cache is damaged, or the entry of another program; {consequence}")
        return None

    def put_sealed(cache: Any, key: str, value: bytes) -> None:
        put(cache, key, _seal(key, value) + value if key.endswith(_SEALED_SUFFIX) else value)

    module.LRUCache.get, module.LRUCache.put = get_sealed, put_sealed


def _seal(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + content).digest()


def _cpu_cache_folder() -> str | None:
    """Returns a folder whose name identifies all that compiled CPU programs depend on; None if the user has no home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    with suppress(RuntimeError):  # the user has no home directory
        cache = cache.expanduser()
    if not cache.is_absolute():
        return None
    try:
        first_cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:  # not Linux
        first_cpu = ""
    lines = [line for line in first_cpu.splitlines() if line.partition("\t")[0] in _CPU_LINES]
    versions = [version(package) for package in ("jax", "jaxlib")]
    identity = "\n".join([*(lines or [platform.platform()]), platform.machine(), *versions])
    return str(cache / "jaxmnt" / f"{_FOLDER}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}")


def _jax_cache_folder() -> str | None:
    folder: str | None = jax.config.values["jax_compilation_cache_dir"]
    return folder
