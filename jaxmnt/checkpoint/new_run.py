"""Writes run directories with one checkpoint of a model, which no run has trained there."""

import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from jaxmnt.checkpoint.arrays import Writer
from jaxmnt.checkpoint.commit import begin_step, commit
from jaxmnt.checkpoint.manifest import Base, Manifest
from jaxmnt.checkpoint.refs import CHECKPOINTS, RUN_FILE
from jaxmnt.config.load import dump_config
from jaxmnt.config.schema import CLUSTER_SECTIONS, Config
from jaxmnt.errors import ConfigError, UserError
from jaxmnt.storage import publish
from jaxmnt.strict_json import json_text


@contextmanager
def new_folder(out: Path) -> Iterator[None]:
    """Removes the folder `out`, which the caller creates, after an error.

    Raises `ConfigError` if it exists already, and `UserError` if it cannot be written.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; name a new folder")
    try:
        yield
    except BaseException as error:
        shutil.rmtree(out, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(
                f"{error.filename or out} cannot be written: {error.strerror or error}; fix that and run the same "
                "command again"
            ) from error
        raise


def begin_checkpoint(out: Path, step: int) -> Writer:
    """Returns a writer for the arrays of the only checkpoint in the run directory `out`."""
    path = out / CHECKPOINTS / str(step)
    path.parent.mkdir(parents=True)
    begin_step(path)
    return Writer(path)


def commit_run(
    out: Path,
    config: Config,
    writer: Writer,
    step: int,
    *,
    tokens: int = 0,
    data_digests: Mapping[str, str] | None = None,
    base: Base | None = None,
) -> Path:
    """Commits the checkpoint, and writes the run's config and its id. Returns the path of the checkpoint. `base`
    describes the frozen parameters of a run with adapters."""
    path, run = out / CHECKPOINTS / str(step), secrets.token_hex(6)
    tree = config.model_dump(exclude=CLUSTER_SECTIONS)
    manifest = Manifest(
        run, step, writer.finish(), tree, tokens, dict(data_digests or {}), loss=None, lineage=[], base=base
    )
    commit(path, manifest)
    (out / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    publish(out / RUN_FILE, json_text({"run": run, "lineage": [], "time": time.time()}, indent=1) + "\n")
    return path
