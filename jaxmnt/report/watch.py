"""Serves the report on a local port for `--watch`, and rebuilds it when a run has written new records."""

import os
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from jaxmnt.errors import ConfigError, ExitCode, UserError
from jaxmnt.report.contents import report_of
from jaxmnt.report.page import as_json, page
from jaxmnt.telemetry.events import METRICS, PHASE_LINES, RESOURCES, event_files
from jaxmnt.telemetry.local_http import LocalHandler, LocalServer

PAGE_POLL_SECONDS = 5.0
"""Interval at which the page asks the server for new data."""
_MAX_AGE_SECONDS = 60.0
"""Age at which a report is rebuilt even if no file has changed."""
_REBUILD_PAUSE_FACTOR = 10.0
"""Minimum pause between two builds, as a multiple of the time of the last build.

Building the report of a long run takes seconds.
"""


def serve(runs: Sequence[str], price: float | None, port: int) -> int:
    """Serves the report until Ctrl-C. Raises `ConfigError` if a run has no records or the port is unavailable."""
    latest = LatestReport(runs, price)
    latest.get()
    with server_for(latest, port) as server:
        print(f"serving http://127.0.0.1:{server.server_address[1]}/ until Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return ExitCode.FINISHED


def server_for(latest: "LatestReport", port: int) -> LocalServer:
    """Returns a server that serves the latest report. Raises `ConfigError` if the port is unavailable."""
    try:
        return LocalServer(("127.0.0.1", port), type("Handler", (_Handler,), {"latest": latest}))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--port: {port} cannot be opened: {error}; give another port, or 0 for any free port"
        ) from error


class LatestReport:
    """The latest report and its version. The report is rebuilt when files have changed, but not too often.

    All methods are thread-safe.
    """

    def __init__(self, runs: Sequence[str], price: float | None):
        self._runs, self._price = list(runs), price
        self._built_file_state: list[Any] | None = None
        self._report: dict[str, Any] = {}
        self._version = 0
        self._next_build_time = self._built_time = 0.0
        self._lock = threading.Lock()

    def get(self) -> tuple[str, dict[str, Any]]:
        """Returns the version, as an HTTP entity tag, and the report; rebuilds the report first if necessary."""
        with self._lock:
            state, now = self._file_state(), time.monotonic()
            # Whether a run is still active depends on the current time as well as on its files.
            is_stale = now > self._built_time + _MAX_AGE_SECONDS
            if (state != self._built_file_state or is_stale) and now >= self._next_build_time:
                self._report = report_of(self._runs, self._price) | {"watch_seconds": PAGE_POLL_SECONDS}
                self._built_file_state = state
                self._version += 1
                self._built_time = time.monotonic()
                self._next_build_time = self._built_time + _REBUILD_PAUSE_FACTOR * (self._built_time - now)
            return f'"{os.getpid()}-{self._version}"', self._report

    def _file_state(self) -> list[Any]:
        """Returns the modification time and the size of each file that the report reads; None for a missing file."""
        state: list[Any] = []
        for run in map(Path, self._runs):
            for path in [run / METRICS, run / PHASE_LINES, run / RESOURCES, run / "config.yaml", *event_files(run)]:
                try:
                    status = path.stat()
                    state.append((status.st_mtime_ns, status.st_size))
                except OSError:
                    state.append(None)
        return state


class _Handler(LocalHandler):
    latest: LatestReport

    def respond(self) -> None:
        if not self.asks_for_this_host():
            self.answer(HTTPStatus.FORBIDDEN, "text/plain", "ask for 127.0.0.1\n")
            return
        try:
            version, report = self.latest.get()
        except UserError as error:
            self.answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n")
            return
        if self.path == "/":
            self.answer(HTTPStatus.OK, "text/html", page(report, live=True))
        elif self.path != "/data.json":
            self.answer(HTTPStatus.NOT_FOUND, "text/plain", "not found: only / and /data.json exist\n")
        elif self.headers.get("If-None-Match") == version:
            self.answer(HTTPStatus.NOT_MODIFIED, "application/json", "", ETag=version)
        else:
            self.answer(HTTPStatus.OK, "application/json", as_json(report), ETag=version)
