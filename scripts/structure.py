#!/usr/bin/env python3
"""scripts/structure.py [ROOT]: the package in figures, and its imports against the floors of docs/architecture.md.

ROOT is the folder with jaxmnt/ and docs/ in it (default: this repository). Ends with 1 if an import points up, or some
modules import each other in a circle. Imports inside functions count as others do.
"""

import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

PACKAGE = "jaxmnt"


class Import(NamedTuple):
    """That one module imports another."""

    source: str
    target: str
    lazy: bool
    """Whether only inside a function."""


def modules(root: Path) -> dict[str, Path]:
    """The file of each module, by the module's name without the package's."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(root / PACKAGE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports(files: dict[str, Path]) -> list[Import]:
    """What the modules import of each other, in order."""
    found: dict[tuple[str, str], bool] = {}
    for source, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        inside = {id(node) for function in functions for node in ast.walk(function)}
        for node in ast.walk(tree):
            for target in _targets(node, files):
                lazy = id(node) in inside
                found[source, target] = found.get((source, target), True) and lazy
    return [Import(source, target, lazy) for (source, target), lazy in sorted(found.items()) if source != target]


def _targets(node: ast.AST, files: dict[str, Path]) -> list[str]:
    """The modules of the package that a statement imports."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return []
    own = [name.removeprefix(f"{PACKAGE}.") for name in names if name.startswith(f"{PACKAGE}.")]
    known = [name if name in files else name.rpartition(".")[0] for name in own]
    return [name for name in known if name in files and name != "__init__"]


def floors(root: Path) -> list[tuple[str, list[str]]]:
    """The floors from the top down, each with the packages and modules that are on it."""
    text = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = re.search(r"^## Floors\n.*?^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    if not found:
        raise SystemExit(f"{root}/docs/architecture.md: there must be a block of floors under '## Floors'")
    return [(line.split()[0], line.split()[1:]) for line in found[1].splitlines()]


def upward(found: list[Import], levels: list[tuple[str, list[str]]]) -> list[str]:
    """Each import that points up, and each module that is on no floor, in words."""
    height = {name: -number for number, (_, names) in enumerate(levels) for name in names}

    def floor(module: str) -> int | None:
        while module and module not in height:
            module = module.rpartition(".")[0]
        return height.get(module)

    wrong = []
    for source, target, lazy in found:
        here, there = floor(source), floor(target)
        nowhere = source if here is None else target if there is None else None
        if nowhere is not None:
            wrong.append(f"{nowhere} is on no floor")
        elif here is not None and there is not None and there > here:
            wrong.append(f"{source} imports {target}, which is above it{' (inside a function)' if lazy else ''}")
    return sorted(set(wrong))


def cycles(found: list[Import]) -> list[list[str]]:
    """Groups of modules that import each other in a circle (Tarjan, SIAM J. Comput. 1972)."""
    graph: dict[str, list[str]] = {}
    for source, target, _ in found:
        graph.setdefault(source, []).append(target)
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in graph.get(module, []):
            if other not in number:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == number[module]:
            at = stack.index(module)
            groups.append(sorted(stack[at:]))
            del stack[at:]

    for module in sorted(graph):
        if module not in number:
            visit(module)
    return [group for group in groups if len(group) > 1]


def packages(found: list[Import]) -> list[Import]:
    """The imports between packages. A command that is inside a package is apart from it."""
    apart = lambda module: module if module.endswith("__main__") else module.partition(".")[0]
    pairs = {(apart(source), apart(target)) for source, target, _ in found}
    return [Import(source, target, lazy=False) for source, target in sorted(pairs) if source != target]


def _figures(files: dict[str, Path], found: list[Import]) -> list[str]:
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in files.items()}
    fan_out = {name: sum(one.source == name for one in found) for name in files}
    most = sorted(fan_out, key=lambda name: (-fan_out[name], name))[:5]
    largest = sorted(lines, key=lambda name: (-lines[name], name))[:5]
    return [
        f"files       {len(files)}, {sum(count < 50 for count in lines.values())} of them under 50 lines",
        f"lines       {sum(lines.values())}",
        f"largest     {', '.join(f'{name} {lines[name]}' for name in largest)}",
        f"imports     {len(found)} from one module to another, {sum(one.lazy for one in found)} only inside functions",
        f"fan-out     {', '.join(f'{name} {fan_out[name]}' for name in most)}",
    ]


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    files = modules(root)
    found = imports(files)
    circles = [f"circle: {', '.join(group)}" for group in [*cycles(found), *cycles(packages(found))]]
    wrong = [*upward(found, floors(root)), *circles]
    print("\n".join([*_figures(files, found), *(wrong or ["No import points up, and there is no circle."])]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
