"""Tells somebody: runs the user's command (`run.notify`) at events that a person should hear of."""

import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from jaxmnt.errors import ConfigError, remark
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.events import FAILED_START, LAST

NOTIFIED = frozenset({
    "failed", FAILED_START, "peer_lost", "hang", "replicas_differ", "checkpoint_failed", "straggler", "slow_device",
    "host_fault", "loss_spike",
})  # fmt: skip
"""Kinds of events at which the command is run."""

_LAST_SECONDS = 2.0
"""For the command to be started and told, when this process is about to end."""


class Notifier:
    """Starts the command, with the event as JSON on its standard input, and goes on: nothing waits for it.

    Process 0 notifies; of what becomes of process 0 itself, when it cannot say so, process 1 does.
    """

    def __init__(self, command: Sequence[str], process: int, run_dir: str):
        """Raises `ConfigError` if there is no such program."""
        if command and process < 2 and shutil.which(command[0]) is None:
            raise ConfigError(f"run.notify: {command[0]} was not found; give the path of a program that can be run")
        self._command, self._process, self._run_dir = list(command), process, run_dir

    def __call__(self, event: dict[str, Any]) -> None:
        if not self._command or event["kind"] not in NOTIFIED or not self._is_ours(event):
            return
        telling = threading.Thread(target=self._tell, args=(event,), name="run.notify", daemon=True)
        telling.start()
        if event["kind"] in LAST:
            telling.join(_LAST_SECONDS)  # this process is about to end

    def _tell(self, event: dict[str, Any]) -> None:
        """In a thread: a file system that hangs, or a program that does not read, holds up nobody else."""
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"JAXMNT_EVENT": event["kind"], "JAXMNT_RUN": self._run_dir},
                start_new_session=True,  # it outlives this process
            )
        except OSError as error:
            remark(f"note: run.notify: {self._command[0]} could not be told of {event['kind']}: {error.strerror}")
            return
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # it need not read
            process.stdin.write(json_text(event, default=str).encode())
        process.wait()

    def _is_ours(self, event: dict[str, Any]) -> bool:
        if event["kind"] == "peer_lost" and event.get("at_fault") == 0:
            return self._process == 1 and not event.get("by_itself")  # else process 0 has told
        return self._process == 0
