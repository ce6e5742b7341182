"""The report as one HTML file that opens offline: it contains styles, scripts and data; its policy forbids all else.

The same report always gives the same file. The policy allows scripts by their digest (Content Security Policy,
https://www.w3.org/TR/CSP3/), so text from a run directory never runs.
"""

import base64
import hashlib
import html
from importlib.resources import files
from typing import Any

from jaxmnt.strict_json import json_text

_WEB = files("jaxmnt.report") / "web"


def page(report: dict[str, Any], *, live: bool = False) -> str:
    """Returns the HTML of a report. A `live` page is served, and polls its server for new data."""
    styles = _asset("uPlot.min.css") + _asset("report.css")
    charts, script = _asset("uPlot.min.js"), _asset("report.js")
    policy = [
        "default-src 'none'",
        f"script-src {_digest(charts)} {_digest(script)}",
        f"style-src {_digest(styles)}",
        "img-src data:",
        *(["connect-src 'self'"] if live else []),
        "base-uri 'none'",
        "form-action 'none'",
    ]
    values = {
        "policy": "; ".join(policy),
        "title": html.escape("Report: " + ", ".join(run["run"] for run in report["runs"])),
        "style": styles,
        "data": _escape_for_script(as_json(report)),
        "uplot": charts,
        "script": script,
    }
    first, *parts = _asset("report.html").split("{{")
    return first + "".join(values[name] + rest for name, rest in (part.split("}}", 1) for part in parts))


def as_json(report: dict[str, Any], indent: int | None = None) -> str:
    """Returns a report as JSON that every reader accepts: numbers that are not finite become null."""
    separators = (",", ":") if indent is None else None
    return json_text(report, indent=indent, separators=separators)


def _asset(name: str) -> str:
    return (_WEB / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _escape_for_script(text: str) -> str:
    """Returns JSON escaped so that it cannot end its script element."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").replace("\u2028", "\\u2028")
