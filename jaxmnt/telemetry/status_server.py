"""Serves the current status of a run over HTTP, for Prometheus, for health checks, and for the operators of the run.

The server is read-only, and listens only on this host by default.
"""

import math
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from jaxmnt.errors import remark
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.local_http import LOOPBACK_NAMES, LocalHandler, LocalServer, LocalServer6
from jaxmnt.telemetry.stacks import write_stacks

Status = dict[str, Any]

_POLL_SECONDS = 0.05
"""Time between two checks for a request to shut down."""

_GAUGES = {
    "step": "The last step whose metrics are known.",
    "steps": "Steps of the whole run.",
    "loss": "Mean loss of the last step.",
    "grad_norm": "Global norm of the gradient of the last step.",
    "learning_rate": "Learning rate of the last step.",
    "tokens_per_second": "Targets that count in the loss, per second.",
    "padded_tokens_per_second": "All tokens, per second.",
    "step_seconds": "Seconds of the last step.",
    "data_wait_seconds": "Seconds for which process 0 waited for the input of the last step.",
    "mfu": "Model FLOPs utilisation.",
    "hfu": "Hardware FLOPs utilisation.",
    "stragglers": "Processes that delay the others, counted once for each phase in which they do so.",
    "spent": "What the run has cost over all its starts.",
}
_COUNTERS = {"tokens": "Targets trained on.", "bad_steps": "Steps without a finite loss or gradient."}


@contextmanager
def serving(host: str, port: int, status: Callable[[], Status]) -> Iterator[str | None]:
    """Serves /metrics for Prometheus, /status as JSON, /healthz and /stacks, in separate threads.

    Port 0 picks a free port. `status` is called from other threads. Yields the URL without a path, or None if the
    address is not available. In that case a note is shown, and the run continues without the server.
    """
    handler = type("Handler", (_Handler,), {"status": staticmethod(status), "is_local_only": host in LOOPBACK_NAMES})
    try:
        server = (LocalServer6 if ":" in host else LocalServer)((host, port), handler)
    except (OSError, OverflowError, TypeError, ValueError) as error:  # the last three are for malformed host names
        remark(f"note: telemetry.port: {host}:{port} is not available: {error}; the run continues without it")
        yield None
        return
    with server:
        serve = lambda: server.serve_forever(_POLL_SECONDS)
        threading.Thread(target=serve, name="status server", daemon=True).start()
        name = f"[{server.server_name}]" if ":" in server.server_name else server.server_name
        try:
            yield f"http://{name}:{server.server_port}"
        finally:
            server.shutdown()


class _Handler(LocalHandler):
    """Serves the pages of the status server. A server that listens only on this host answers only requests that name
    this host."""

    status: Callable[[], Status]
    is_local_only: bool

    def respond(self) -> None:
        pages: dict[str, tuple[str, Callable[[], str]]] = {
            "/metrics": ("text/plain; version=0.0.4", lambda: prometheus_text(self.status())),
            "/status": ("application/json", lambda: json_text(self.status(), indent=2) + "\n"),
            "/healthz": ("text/plain", lambda: f"step {self.status().get('step', 0)}\n"),
            "/stacks": ("text/plain", stacks),
        }
        page = pages.get(self.path.partition("?")[0])
        if self.is_local_only and not self.asks_for_this_host():
            self.answer(HTTPStatus.FORBIDDEN, "text/plain", "ask for localhost\n")
        elif page is None:
            self.answer(HTTPStatus.NOT_FOUND, "text/plain", f"the pages are {', '.join(pages)}\n")
        else:
            kind, text_of_page = page
            self.answer(HTTPStatus.OK, kind, text_of_page())


def prometheus_text(status: Status) -> str:
    """Returns the numbers in a status in Prometheus' text format 0.0.4. Unknown numbers are left out."""
    families: list[tuple[str, str, str, Mapping[str, Any]]] = [
        *((name, "gauge", help_text, {"": status.get(name)}) for name, help_text in _GAUGES.items()),
        *((f"{name}_total", "counter", help_text, {"": status.get(name)}) for name, help_text in _COUNTERS.items()),
    ]
    phases = {f'{{phase="{phase}"}}': seconds for phase, seconds in sorted((status.get("phases") or {}).items())}
    resources = _labelled(_resources(status.get("resources")))
    families += [
        ("phase_seconds", "gauge", "Mean over processes, in the last step.", phases),
        ("model_metric", "gauge", "A metric of the model's layers in the last step.", _labelled(status.get("model"))),
        ("resource", "gauge", "Resource use of hosts and devices, as a statistic over all of them.", resources),
    ]
    lines = []
    for name, kind, help_text, samples in families:
        values = {labels: value for labels, value in samples.items() if isinstance(value, int | float)}
        lines += [f"# HELP jaxmnt_{name} {help_text}", f"# TYPE jaxmnt_{name} {kind}"] if values else []
        lines += [f"jaxmnt_{name}{labels} {_number(value)}" for labels, value in values.items()]
    return "\n".join(lines) + "\n"


def _resources(resources: Any) -> dict[str, Any]:
    """Returns the resource use for each QUANTITY/STATISTIC, without the processes that have the minimum and maximum."""
    without_process = lambda value: value[0] if isinstance(value, list) else value
    return {
        f"{quantity}/{statistic}": without_process(value)
        for quantity, statistics in (resources or {}).items()
        for statistic, value in statistics.items()
    }


def _labelled(values: dict[str, Any] | None) -> dict[str, Any]:
    """Returns each value by its Prometheus labels, which are its name and the statistic after a / in the name."""
    labelled = {}
    for name, value in sorted((values or {}).items()):
        first, _, second = re.sub(r'[\\"\n]', "", name).partition("/")
        labelled[f'{{name="{first}",statistic="{second}"}}' if second else f'{{name="{first}"}}'] = value
    return labelled


def stacks() -> str:
    """Returns the stacks of all threads of this process."""
    # `write_stacks` needs a file with a descriptor. On Linux it is in memory, as a container may lack a temp folder.
    in_memory = hasattr(os, "memfd_create")
    with os.fdopen(os.memfd_create("stacks"), "w+b") if in_memory else tempfile.TemporaryFile("w+b") as file:
        write_stacks(file)
        file.seek(0, os.SEEK_SET)
        return file.read().decode(errors="replace")


def _number(value: float) -> str:
    """Formats a number as Prometheus does."""
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
