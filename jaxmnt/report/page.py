"""The report as one HTML file that opens offline, because it contains its styles, scripts and data.

The same report always gives the same file. A Content Security Policy (https://www.w3.org/TR/CSP3/) allows only the
scripts and styles with given digests, so text from a run directory is never executed, and nothing else is loaded.
"""

import base64
import hashlib
import html
from importlib.resources import files
from typing import Any

from jaxmnt.strict_json import json_text

_WEB = files("jaxmnt.report") / "web"


def page(report: dict[str, Any], *, live: bool = False) -> str:
    """Returns the HTML of a report. A `live` page polls the server that it came from for new data."""
    styles = _asset("uPlot.min.css") + _asset("report.css")
    chart_library = _asset("uPlot.min.js")
    script = _asset("report.js")
    policy = [
        "default-src 'none'",
        f"script-src {_csp_source(chart_library)} {_csp_source(script)}",
        f"style-src {_csp_source(styles)}",
        "img-src data:",
        *(["connect-src 'self'"] if live else []),
        "base-uri 'none'",
        "form-action 'none'",
    ]
    contents_by_name = {
        "policy": "; ".join(policy),
        "title": html.escape("Report: " + ", ".join(run["run"] for run in report["runs"])),
        "style": styles,
        "data": _escape_for_script(as_json(report)),
        "uplot": chart_library,
        "script": script,
    }
    html_page, *parts = _asset("report.html").split("{{")
    for part in parts:
        name, text = part.split("}}", 1)
        html_page += contents_by_name[name] + text
    return html_page


def as_json(report: dict[str, Any], indent: int | None = None) -> str:
    """Returns a report as JSON that every parser accepts, because numbers that are not finite become null."""
    separators = (",", ":") if indent is None else None
    return json_text(report, indent=indent, separators=separators)


def _asset(name: str) -> str:
    return (_WEB / name).read_text(encoding="utf-8")


def _csp_source(text: str) -> str:
    """Returns the digest of a script or style in the form in which a Content Security Policy allows it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _escape_for_script(text: str) -> str:
    """Returns JSON escaped so that it cannot end its script element."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").replace("\u2028", "\\u2028")
