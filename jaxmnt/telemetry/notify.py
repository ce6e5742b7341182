"""Notifies the user: runs their command (`run.notify`) at events that need a person's attention."""

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
"""Seconds to start the command and pass it the event when this process is about to end."""


class Notifier:
    """Starts the command in the background, with the event as JSON on its standard input.

    Process 0 notifies. Process 1 does so if process 0 is lost and cannot report it itself.
    """

    def __init__(self, command: Sequence[str], process: int, run_dir: str):
        """Raises `ConfigError` if the program does not exist."""
        if command and process < 2 and shutil.which(command[0]) is None:
            raise ConfigError(f"run.notify: {command[0]} was not found; give the path of an executable program")
        self._command, self._process, self._run_dir = list(command), process, run_dir

    def __call__(self, event: dict[str, Any]) -> None:
        if not self._command or event["kind"] not in NOTIFIED or not self._is_ours(event):
            return
        thread = threading.Thread(target=self._notify, args=(event,), name="run.notify", daemon=True)
        thread.start()
        if event["kind"] in LAST:
            thread.join(_LAST_SECONDS)  # this process is about to end

    def _notify(self, event: dict[str, Any]) -> None:
        """Runs the command, in a thread: a hanging file system, or a program that does not read, must not block the
        run."""
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
            remark(f"note: run.notify: {self._command[0]} could not be started for {event['kind']}: {error.strerror}")
            return
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # the program may ignore its input
            process.stdin.write(json_text(event, default=str).encode())
        process.wait()

    def _is_ours(self, event: dict[str, Any]) -> bool:
        """Returns True if this process is the one that notifies of the event."""
        if event["kind"] == "peer_lost" and event.get("at_fault") == 0:
            return self._process == 1 and not event.get("by_itself")  # else process 0 has notified
        return self._process == 0
