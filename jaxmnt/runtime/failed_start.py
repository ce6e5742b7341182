"""What is noted of a start that came to nothing: a launcher can then leave a host out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxmnt.cluster.ending import Ending, Fate
from jaxmnt.cluster.environment import Identity
from jaxmnt.config.schema import Config
from jaxmnt.errors import ExitCode, UserError
from jaxmnt.telemetry.events import FAILED_START, Events

_ABOUT_THE_START = (ExitCode.CONFIG, ExitCode.PREFLIGHT)
"""With these a start ends by an error of ours. Where that names a host, it is noted as a failed start."""


@contextmanager
def noting_a_failed_start(
    config: Config, identity: Identity, ending: Ending, has_opened: Callable[[], bool]
) -> Iterator[None]:
    """Writes an event about an error inside that names hosts or processes, and about this process's end.

    That is the run's own matter from when it has its own events, which `has_opened` tells.
    """
    assert config.run.dir is not None
    run_dir = Path(config.run.dir)

    def note(fate: Fate) -> None:
        if not has_opened() and fate.code not in _ABOUT_THE_START:
            note_fate(Events(run_dir, identity.process_id), fate)

    try:
        with ending.with_last(note):
            yield
    except UserError as error:
        if error.hosts or error.processes:
            # The run directory may be what is wrong, and the error itself is told anyway.
            with suppress(OSError, ValueError):
                process, host = next(iter(error.processes), None), next(iter(error.hosts), None)
                fate = Fate(FAILED_START, str(error), error.exit_code, process, host)
                note_fate(Events(run_dir, identity.process_id), fate)
        raise


def note_fate(events: Events, fate: Fate) -> None:
    events.write(fate.kind, why=fate.why, code=int(fate.code), at_fault=fate.process, at_fault_host=fate.host)
