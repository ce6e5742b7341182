"""What NCCL says it has chosen, from its log files (NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=INIT,NET)."""

import os
import re
from pathlib import Path

from jaxmnt.errors import ConfigError
from jaxmnt.preflight.rows import Row, good, warning

_USING = re.compile(r"NCCL INFO NET/(IB|Socket) : Using (.+)")
_PLUGIN = re.compile(r"NCCL INFO Using network (\S+)")


def write_logs_to(folder: Path) -> None:
    """Lets NCCL, which reads this when it starts, write a file a process. Raises `ConfigError` if the folder cannot be
    made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.glob("nccl-*.log")):
            old.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--nccl-debug: {folder} cannot be made: {error.strerror}; choose another run.dir") from error
    os.environ |= {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": str(folder / "nccl-%h-%p.log"),
    }


def transport(text: str) -> str:
    """Which network and interfaces one process's NCCL uses; empty if it does not say."""
    using, plugin = _USING.findall(text), _PLUGIN.findall(text)
    parts = [f"{kind} {where.strip()}" for kind, where in using]
    return ", ".join([*dict.fromkeys(plugin), *dict.fromkeys(parts)])


def rows(folder: Path, host: str) -> list[Row]:
    """What the files there tell; `host` is where nothing is told."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("nccl-*.log")):
        said = transport(path.read_text(errors="replace"))
        if said:
            found.setdefault(said, []).append(path.name.removeprefix("nccl-").rpartition("-")[0])
    if not found:
        return [warning("NCCL", host, f"it wrote nothing into {folder}", "it only runs between GPUs")]
    return [good("NCCL", ", ".join(dict.fromkeys(hosts)), said) for said, hosts in sorted(found.items())]
