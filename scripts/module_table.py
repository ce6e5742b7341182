#!/usr/bin/env python3
"""scripts/module_table.py: prints docs/modules.md, a line for each module from the first sentence of its doc string.

Run it as `python scripts/module_table.py > docs/modules.md` after a doc string of a module has changed.
"""

import ast
import re
import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_HEAD = """# Modules

One line for each module, from its doc string (`scripts/module_table.py` writes this page).
[Architecture](architecture.md) says which package may import which.
"""


def first_sentence(path: Path) -> str:
    """Returns the first sentence of a module's doc string, on one line; empty if there is none.

    A paragraph with the usage of a command has no sentence and is passed over.
    """
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    sentences = (re.match(r".*?\.(?= [A-Z]|$)", part) for part in paragraphs)
    return next((match[0] for match in sentences if match), paragraphs[0]).replace("|", "\\|")


def table() -> str:
    """Returns the page: a section for each package, a row for each module with a doc string."""
    package = ROOT / "jaxmnt"
    files = sorted(package.rglob("*.py"), key=lambda path: (path.parent != package, path))
    sections = []
    for folder, paths in groupby(files, key=lambda path: path.parent):
        rows = [(path.name, first_sentence(path)) for path in paths]
        lines = [f"| `{name}` | {sentence} |" for name, sentence in rows if sentence]
        name = ".".join(folder.relative_to(ROOT).parts)
        if lines:
            sections.append("\n".join([f"## {name}", "", "| Module | |", "| --- | --- |", *lines]))
    return "\n\n".join([_HEAD.strip(), *sections]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
