"""Naming a checkpoint: RUN_DIR, RUN_DIR@STEP, or its own directory."""

from pathlib import Path

from jaxmnt.checkpoint.commit import Committed, newest_whole, open_checkpoint, step_directories
from jaxmnt.checkpoint.manifest import FILE, DamagedError
from jaxmnt.errors import ConfigError


def find(text: str, argument: str) -> Committed:
    """The whole checkpoint that `text` names; of a run without a step, the newest.

    Raises `ConfigError`, naming `argument`, if there is none or it is not whole.
    """
    path = locate(text, argument)
    if path is None:
        root = Path(text) / "checkpoints"
        newest = newest_whole(root)
        if newest is None:
            raise ConfigError(f"{argument}: {root} has no whole checkpoint; name another run")
        return newest
    try:
        return open_checkpoint(path)
    except DamagedError as damage:
        raise ConfigError(f"{argument}: checkpoint {path} is not whole: {damage}; name another") from damage


def locate(text: str, argument: str) -> Path | None:
    """The directory of the one checkpoint that `text` names; None if it names a run without a step."""
    run, at, step = text.rpartition("@")
    if at and step.isdigit():
        root = Path(run) / "checkpoints"
        path = root / step
        if not path.is_dir():
            known = ", ".join(str(number) for number, _ in step_directories(root)) or "none"
            raise ConfigError(f"{argument}: {root} has no checkpoint of step {step}; there are: {known}")
        return path
    path = Path(text)
    if (path / FILE).exists():
        return path
    if not (path / "checkpoints").is_dir():
        raise ConfigError(f"{argument}: {path} is neither a run directory nor a checkpoint; check the path")
    return None
