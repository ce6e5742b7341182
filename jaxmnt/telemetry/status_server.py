"""What a run does at this moment, over HTTP: for Prometheus, for probes, and for whoever looks after it.

Bound to this host unless told otherwise. It reads what the run has noted, and changes nothing.
"""

import math
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from typing import Any

from jaxmnt.errors import remark
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.local_http import HERE, LocalHandler, LocalServer, LocalServer6
from jaxmnt.telemetry.stacks import write_stacks

Status = dict[str, Any]

_LOOK_SECONDS = 0.05
"""Between two looks whether it is to end."""

_GAUGES = {
    "step": "The last step whose metrics are known.",
    "steps": "Steps of the whole run.",
    "loss": "Mean loss of the last step.",
    "grad_norm": "Global norm of the gradient of the last step.",
    "learning_rate": "Learning rate of the last step.",
    "tokens_per_second": "Targets that count in the loss, a second.",
    "padded_tokens_per_second": "All tokens, a second.",
    "step_seconds": "Seconds of the last step.",
    "data_wait_seconds": "Seconds for which process 0 waited for the input of the last step.",
    "mfu": "Model FLOPs utilisation.",
    "hfu": "Hardware FLOPs utilisation.",
    "stragglers": "Processes that hold the others up, once for each phase in which they do.",
    "spent": "What the run has cost over all its starts.",
}
_COUNTERS = {"tokens": "Targets trained on.", "bad_steps": "Steps without a finite loss or gradient."}


class StatusServer:
    """Answers in threads of its own: /metrics for Prometheus, /status as JSON, /healthz, /stacks. Used as a context
    manager. If the address cannot be had, that is said, and the run goes on without."""

    def __init__(self, host: str, port: int, status: Callable[[], Status]):
        """Port 0 is any that is free. `status` is called from other threads."""
        self.address: tuple[str, int] | None = None
        """Where it answers; None if nowhere."""
        handler = type("Handler", (_Handler,), {"status": staticmethod(status), "only_here": host in HERE})
        try:
            self._server: ThreadingHTTPServer | None = (LocalServer6 if ":" in host else LocalServer)(
                (host, port), handler
            )
        except (OSError, OverflowError, TypeError, ValueError) as error:  # also names that are none
            self._server = None
            remark(f"note: telemetry.port: {host}:{port} cannot be had: {error}; the run goes on without it")
            return
        name, port = self._server.server_address[:2]
        self.address = str(name), int(port)

    @property
    def url(self) -> str:
        """Without a path."""
        assert self.address is not None
        name, port = self.address
        return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"

    def __enter__(self) -> "StatusServer":
        if self._server is not None:
            threading.Thread(
                target=self._server.serve_forever, args=(_LOOK_SECONDS,), name="status server", daemon=True
            ).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class _Handler(LocalHandler):
    status: Callable[[], Status]
    only_here: bool

    def respond(self) -> None:
        pages = {"/metrics": self._metrics, "/status": self._status, "/healthz": self._healthz, "/stacks": self._stacks}
        page = pages.get(self.path.partition("?")[0])
        if self.only_here and not self.asks_for_this_host():
            self.answer(HTTPStatus.FORBIDDEN, "text/plain", "ask for localhost\n")
        elif page is None:
            self.answer(HTTPStatus.NOT_FOUND, "text/plain", f"there are {', '.join(pages)}\n")
        else:
            kind, text = page()
            self.answer(HTTPStatus.OK, kind, text)

    def _metrics(self) -> tuple[str, str]:
        return "text/plain; version=0.0.4", prometheus_text(self.status())

    def _status(self) -> tuple[str, str]:
        return "application/json", json_text(self.status(), indent=2) + "\n"

    def _healthz(self) -> tuple[str, str]:
        return "text/plain", f"step {self.status().get('step', 0)}\n"

    def _stacks(self) -> tuple[str, str]:
        return "text/plain", stacks()


def prometheus_text(status: Status) -> str:
    """The numbers of a status in Prometheus' text format 0.0.4. What is not known is left out."""
    lines = []
    for kind, names in (("gauge", _GAUGES), ("counter", _COUNTERS)):
        for name, what in names.items():
            value = status.get(name)
            if isinstance(value, int | float):
                full = f"jaxmnt_{name}_total" if kind == "counter" else f"jaxmnt_{name}"
                lines += [f"# HELP {full} {what}", f"# TYPE {full} {kind}", f"{full} {_number(value)}"]
    phases = status.get("phases") or {}
    if phases:
        full = "jaxmnt_phase_seconds"
        lines += [f"# HELP {full} Mean over processes, of the last step.", f"# TYPE {full} gauge"]
        lines += [f'{full}{{phase="{phase}"}} {_number(seconds)}' for phase, seconds in sorted(phases.items())]
    for name, told, what in (
        ("model_metric", status.get("model"), "A metric of the model's layers, of the last step."),
        ("resource", _resources(status.get("resources")), "What hosts and devices use; the statistic is over all."),
    ):
        values = [(labels, value) for labels, value in _labelled(told or {}) if isinstance(value, int | float)]
        lines += [f"# HELP jaxmnt_{name} {what}", f"# TYPE jaxmnt_{name} gauge"] if values else []
        lines += [f"jaxmnt_{name}{{{labels}}} {_number(value)}" for labels, value in values]
    return "\n".join(lines) + "\n"


def _resources(told: Any) -> dict[str, Any]:
    """By quantity and statistic, without the process that has an extreme."""
    plain = lambda value: value[0] if isinstance(value, list) else value
    return {
        f"{quantity}/{statistic}": plain(value)
        for quantity, of in (told or {}).items()
        for statistic, value in of.items()
    }


def _labelled(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Labels of each value: its name, and behind / a statistic."""
    for name, value in sorted(values.items()):
        first, _, second = (part.replace("\\", "").replace('"', "").replace("\n", "") for part in name.partition("/"))
        yield (f'name="{first}",statistic="{second}"' if second else f'name="{first}"'), value


def stacks() -> str:
    """Where each thread of this process is."""
    # Stacks need a file with a descriptor. On Linux it is in memory: a container may have no temporary folder.
    in_memory = hasattr(os, "memfd_create")
    with os.fdopen(os.memfd_create("stacks"), "w+b") if in_memory else tempfile.TemporaryFile("w+b") as file:
        write_stacks(file)
        file.seek(0, os.SEEK_SET)
        return file.read().decode(errors="replace")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
