"""What is noted of a start that came to nothing because of a host: a launcher can then leave it out."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxmnt.cluster.environment import Identity
from jaxmnt.config.schema import Config
from jaxmnt.errors import UserError
from jaxmnt.telemetry.events import FAILED_START, Events


@contextmanager
def noting_a_failed_start(config: Config, identity: Identity) -> Iterator[None]:
    """Writes an event about an error inside that names hosts or processes."""
    try:
        yield
    except UserError as error:
        if error.hosts or error.processes:
            assert config.run.dir is not None
            with suppress(
                OSError, ValueError
            ):  # the run directory may be what is wrong, and the error itself is told anyway
                Events(Path(config.run.dir), identity.process_id).write(
                    FAILED_START, why=str(error), code=int(error.exit_code),
                    at_fault=error.processes[0] if error.processes else None,
                    at_fault_host=error.hosts[0] if error.hosts else None,
                )  # fmt: skip
        raise
