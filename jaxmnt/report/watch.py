"""--watch: the report on a port of this machine, made anew when a run has written."""

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

WATCH_SECONDS = 5.0
"""Between two questions of the page."""
_STALE_SECONDS = 60.0
_PATIENCE = 10.0
"""Times what a report took to make, before the next is made: a long run takes seconds."""


def serve(runs: Sequence[str], price: float | None, port: int) -> int:
    """Answers until Ctrl-C. Raises `ConfigError` for runs without lines, and if the port cannot be had."""
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
    """Raises `ConfigError` if the port cannot be had."""
    try:
        return LocalServer(("127.0.0.1", port), type("Handler", (_Handler,), {"latest": latest}))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port: {port} cannot be had: {error}; give another, or 0 for any") from error


class LatestReport:
    """The newest report and its version; made anew when files have changed, and not too often. From any thread."""

    def __init__(self, runs: Sequence[str], price: float | None):
        self._runs, self._price = list(runs), price
        self._seen: list[Any] | None = None
        self._report: dict[str, Any] = {}
        self._version = 0
        self._not_before = self._made = 0.0
        self._lock = threading.Lock()

    def get(self) -> tuple[str, dict[str, Any]]:
        with self._lock:
            seen, now = self._state(), time.monotonic()
            stale = now > self._made + _STALE_SECONDS  # whether a run goes on is told by the clock, too
            if (seen != self._seen or stale) and now >= self._not_before:
                self._report = report_of(self._runs, self._price) | {"watch_seconds": WATCH_SECONDS}
                self._seen, self._version, self._made = seen, self._version + 1, time.monotonic()
                self._not_before = self._made + _PATIENCE * (self._made - now)
            return f'"{os.getpid()}-{self._version}"', self._report

    def _state(self) -> list[Any]:
        found: list[Any] = []
        for run in map(Path, self._runs):
            for path in [run / METRICS, run / PHASE_LINES, run / RESOURCES, run / "config.yaml", *event_files(run)]:
                try:
                    status = path.stat()
                    found.append((status.st_mtime_ns, status.st_size))
                except OSError:
                    found.append(None)
        return found


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
            self.answer(HTTPStatus.NOT_FOUND, "text/plain", "there are / and /data.json\n")
        elif self.headers.get("If-None-Match") == version:
            self.answer(HTTPStatus.NOT_MODIFIED, "application/json", "", ETag=version)
        else:
            self.answer(HTTPStatus.OK, "application/json", as_json(report), ETag=version)
