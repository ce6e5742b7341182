"""Notifies the user by running their command (`run.notify`) at events that need a person's attention."""

import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from jaxmnt.errors import ConfigError, remark
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.events import FAILED_START, FINAL_EVENTS

NOTIFIED_EVENTS = frozenset({
    "failed", FAILED_START, "peer_lost", "hang", "replicas_differ", "checkpoint_failed", "straggler", "slow_device",
    "host_fault", "loss_spike", "router_collapse",
})  # fmt: skip
"""Kinds of events at which the command is run."""

_FINAL_TIMEOUT_SECONDS = 2.0
"""Time to start the command and to pass it the event when this process is about to end."""


class Notifier:
    """Starts the command in the background, with the event as JSON on its standard input.

    Process 0 does this. Process 1 does it if process 0 is lost and cannot report that itself.
    """

    def __init__(self, command: Sequence[str], process: int, run_dir: str):
        """Raises `ConfigError` if the program does not exist."""
        if command and process < 2 and shutil.which(command[0]) is None:
            raise ConfigError(f"run.notify: {command[0]} was not found; give the path of an executable program")
        self._command, self._process, self._run_dir = list(command), process, run_dir

    def __call__(self, event: dict[str, Any]) -> None:
        if not self._command or event["kind"] not in NOTIFIED_EVENTS or not self._is_ours(event):
            return
        thread = threading.Thread(target=self._notify, args=(event,), name="run.notify", daemon=True)
        thread.start()
        if event["kind"] in FINAL_EVENTS:
            thread.join(_FINAL_TIMEOUT_SECONDS)  # this process is about to end

    def _notify(self, event: dict[str, Any]) -> None:
        """Runs the command. Called in a thread, because a hanging file system, or a program that does not read its
        input, must not block the run."""
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"JAXMNT_EVENT": event["kind"], "JAXMNT_RUN": self._run_dir},
                start_new_session=True,  # so that the command outlives this process
            )
        except OSError as error:
            remark(f"note: run.notify: {self._command[0]} could not be started for {event['kind']}: {error.strerror}")
            return
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # the program may ignore its input
            process.stdin.write(json_text(event, default=str).encode())
        process.wait()

    def _is_ours(self, event: dict[str, Any]) -> bool:
        """Returns True if this process is the one that notifies the user of the event."""
        if event["kind"] == "peer_lost" and event.get("at_fault") == 0:
            return self._process == 1 and not event.get("by_itself")  # otherwise process 0 has notified the user
        return self._process == 0
