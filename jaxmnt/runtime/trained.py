"""Whether a run has trained before. What it has read then cannot be wrong in its config: a mount is away, or a host."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxmnt.checkpoint.commit import step_directories
from jaxmnt.checkpoint.source import FOLDER
from jaxmnt.config.schema import Config
from jaxmnt.errors import ConfigError, UnreadableError, UserError
from jaxmnt.storage import place
from jaxmnt.telemetry.events import event_file
from jaxmnt.telemetry.records import records


def has_trained(config: Config) -> bool:
    """Whether the run has a checkpoint, or an event that tells of a step, as far as these can be read."""
    directory = Path(config.run.dir or "")
    for where in [directory, *([place(config.checkpoint.dir)] if config.checkpoint.dir else [])]:
        with suppress(OSError):
            if step_directories(where / FOLDER):
                return True
    with suppress(OSError):
        return any(event["kind"] == "started" for event in records(event_file(directory, 0)))
    return False


@contextmanager
def nothing_wrong_with_the_config(config: Config) -> Iterator[None]:
    """Inside, what cannot be read ends a run that has trained with exit code 1, which is tried again, instead of 2."""
    try:
        yield
    except ConfigError as error:
        unreadable = isinstance(error, UnreadableError) or isinstance(error.__cause__, OSError)
        if not unreadable or not has_trained(config):
            raise
        text = f"{error} (this run has read it before: once it is there again, so can the run be started)"
        raise UserError(text).blaming(hosts=error.hosts, processes=error.processes) from error
