"""Settings of the documentation's site. Build it with scripts/docs."""

import re
import sys
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

project = "jaxmnt"
author = "the jaxmnt authors"
project_copyright = "the jaxmnt authors"
release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
version = release

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"jaxmnt {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]

# Doc strings write code in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
smartquotes = False  # it would turn the dashes of options in help texts into others
nitpicky = False  # names of JAX and NumPy are not resolved: no page is read from the network

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "cache"
nb_execution_in_temp = True
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_execution_cache_path = str(ROOT / "docs" / "_build" / "notebooks")


_ABOUT_SETTINGS = """Every key of a config, as `python -m jaxmnt.train --help` lists them. A config file may extend
another file (`extends: FILE`), and top-level keys that begin with `x-` hold YAML anchors.

*On resume* says what a start does if the value differs from that of the run: *harmless* and *planned* are
allowed, *changes the maths* needs `--accept-changes`, and *breaks resume* is refused: begin a branch (`run.fork_from`)
or start anew (`--fresh`). A planned change must only affect later steps, and must not change the next step's learning
rate by more than a factor of 1.5. [Checkpoints](checkpoints.md#going-on-with-another-config) has the details."""


def write_settings() -> None:
    """Writes settings.md, each section of the config with its keys, from the config's own types."""
    from jaxmnt.config.describe import CHANGEABLE_MATHS, ORIGIN_KEYS, RESUME_LABELS, describe_default, fields_by_key
    from jaxmnt.config.explain import describe_values

    sections: dict[str, list[str]] = {}
    for name, field in fields_by_key(of_lists=True).items():
        section = name.partition(".")[0] if "." in name else "top level"
        meaning = RESUME_LABELS[field["resume"]] if "resume" in field else ""
        if name in CHANGEABLE_MATHS:
            meaning = "planned"
        elif name in ORIGIN_KEYS:
            meaning = "only at the first start"
        elif name.startswith("data.") and field.get("path"):
            meaning = "harmless with the same contents"
        facts = [describe_values(field), describe_default(field), *([f"on resume: {meaning}"] if meaning else [])]
        entry = f"`{name}`\n: {field['description']}\\\n  *{facts[0]}* · {' · '.join(facts[1:])}"
        sections.setdefault(section, []).append(entry)
    pages = [f"## {section}\n\n" + "\n\n".join(entries) for section, entries in sections.items()]
    text = "# Settings\n\n" + _ABOUT_SETTINGS + "\n\n" + "\n\n".join(pages) + "\n"
    path = ROOT / "docs" / "settings.md"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


OUTSIDE = {
    "SECURITY": "security",
    "CONTRIBUTING": "contributing",
    "CHANGELOG": "changelog",
    "benchmarks/README": "benchmarks",
} | {f"examples/{page.stem}/README": f"examples/{page.stem}" for page in (ROOT / "docs" / "examples").glob("*.md")}
"""Pages outside of docs/, which pages of the site include, and their names on the site."""


def link_to_included_pages(_: Sphinx, name: str, source: list[str]) -> None:
    """Points links that lead out of docs/, as GitHub needs them, at the pages that include their targets."""
    up = "../" * name.count("/")
    for outside, page in OUTSIDE.items():
        source[0] = source[0].replace(f"](../{up}{outside}.md", f"]({up}{page}.md")


def link_among_included_pages(_: Sphinx, path: Path, parent: str, content: list[str]) -> None:
    """Points links of a page at the root of the repository to another such page at the site's pages."""
    for outside, page in OUTSIDE.items():
        content[0] = re.sub(rf"\]\({outside}\.md", f"]({page}.md", content[0])


def drop_field_numbers(_: Sphinx, what: str, name: str, item: object, options: object, lines: list[str]) -> None:
    """Removes the text that Python gives to fields of a NamedTuple without a doc string."""
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()


def setup(app: Sphinx) -> None:
    """Writes the generated page before Sphinx reads the sources."""
    write_settings()
    app.connect("source-read", link_to_included_pages)
    app.connect("include-read", link_among_included_pages)
    app.connect("autodoc-process-docstring", drop_field_numbers)
