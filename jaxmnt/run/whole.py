"""A run in one process, from its start to its end."""

from collections.abc import Callable

from jaxmnt.distributed.process_group import telling
from jaxmnt.errors import ExitCode
from jaxmnt.run.compiling import compile_run
from jaxmnt.run.loop import train_steps
from jaxmnt.run.opening import open_run
from jaxmnt.run.ready import restore_run
from jaxmnt.run.resume import Consent
from jaxmnt.run.rundir import unreadable_is_retryable
from jaxmnt.run.running import start_running
from jaxmnt.run.values import RunProcess


def train_in(process: RunProcess, consent: Consent, opened: Callable[[], None] = lambda: None) -> ExitCode:
    """Trains in this process of a run. `opened` is called when the run is about to have events of its own."""
    with telling(process.heartbeat), unreadable_is_retryable(process.config):
        run = open_run(process, consent)
        if run.finished:
            return ExitCode.FINISHED
        return train_steps(start_running(restore_run(compile_run(run, opened))))
