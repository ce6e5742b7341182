#!/usr/bin/env python3
"""scripts/language.py [FOLDER]: counts names that say nothing and doc strings that are fragments.

FOLDER has Python files in it (default: this repository's jaxmnt/). Each name and doc string is listed with its place;
then come the counts. `tests/test_structure.py` holds the counts under ceilings.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VAGUE = frozenset({
    "one", "found", "own", "told", "each", "chosen", "given", "wanted",
    "said", "heard", "left", "other", "kept", "known", "asked", "taken",
})  # fmt: skip
"""Participles and pronouns that do not say what a name holds."""
FILLERS = frozenset({"item", "thing", "value", "data", "obj", "res", "tmp"})
"""Nouns that are true of everything. Some uses are right, so their number is limited and not forbidden."""
FRAGMENTS = ("What ", "Of ", "Whether ", "How ", "In ", "By ", "The same")
"""First words of doc strings that are no sentence."""


class Counts(NamedTuple):
    """The figures of a folder, and the places behind them."""

    bindings: int
    """Assigned names, loop variables and arguments."""
    vague: list[str]
    fillers: list[str]
    docs: int
    """Doc strings, those of constants and fields included."""
    fragments: list[str]


def count(folder: Path) -> Counts:
    """Returns the counts over all Python files of a folder."""
    bindings, docs = 0, 0
    vague: list[str] = []
    fillers: list[str] = []
    fragments: list[str] = []
    for path in sorted(folder.rglob("*.py")):
        place = path.relative_to(folder)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, name in _bound_names(tree):
            bindings += 1
            if name in VAGUE:
                vague.append(f"{place}:{line}: {name}")
            if name in FILLERS:
                fillers.append(f"{place}:{line}: {name}")
        for line, text in _doc_strings(tree):
            docs += 1
            if text.startswith(FRAGMENTS):
                fragments.append(f"{place}:{line}: {text.splitlines()[0]}")
    return Counts(bindings, vague, fillers, docs, fragments)


def _bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of each binding."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def _doc_strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each string that stands alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def main(arguments: list[str]) -> None:
    """Prints the places and the counts."""
    folder = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent / "jaxmnt"
    counts = count(folder)
    print("\n".join([*counts.vague, *counts.fragments]))
    print(
        f"{len(counts.vague)} of {counts.bindings} bindings are vague ({len(counts.vague) / counts.bindings:.1%}), "
        f"{len(counts.fillers)} are fillers; {len(counts.fragments)} of {counts.docs} doc strings are fragments "
        f"({len(counts.fragments) / counts.docs:.1%})"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
