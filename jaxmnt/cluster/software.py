"""Which software a process runs, as far as all processes of a run have to run the same."""

import hashlib
import os
import re
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

import jaxmnt

_PACKAGES = {
    "jax version": ("jax",),
    "jaxlib version": ("jaxlib",),
    "CUDA plugin version": ("jax-cuda12-plugin", "jax-cuda13-plugin"),
    "NCCL version": ("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
}
_DRIVER = Path("/proc/driver/nvidia/version")


def software() -> dict[str, str]:
    """Versions, and a digest of jaxmnt's own code. What is not there is `none`."""
    found = {"jaxmnt version": jaxmnt.__version__, "jaxmnt's code": _code_digest()}
    for name, packages in _PACKAGES.items():
        found[name] = next(filter(None, map(_version, packages)), "none")
    return found if os.environ.get("JAX_PLATFORMS") == "cpu" else found | {"driver version": _driver()}


def environment_digest() -> str:
    """A digest of the names and versions of all Python packages that this process could import."""
    names = sorted({f"{one.metadata['Name']}=={one.version}" for one in distributions()})
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]


def _code_digest() -> str:
    """Of all source files of the package, with their names."""
    root = Path(jaxmnt.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str:
    try:
        found = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", _DRIVER.read_text())
    except OSError:
        return "none"
    return found[1] if found else "unknown"
