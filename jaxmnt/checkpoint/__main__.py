"""python -m jaxmnt.checkpoint list|verify|show|diff|export: looks after checkpoints, on any machine.

A checkpoint is named RUN@STEP, RUN (its newest whole one) or by its own directory; RUN is a run directory, or the
folder or gs:// address of checkpoint.dir. No JAX and none of the devices that wrote it are needed.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmnt.commands import HERE, Parser, run_command
from jaxmnt.errors import ConfigError, ExitCode, UserError, printable
from jaxmnt.output import progress
from jaxmnt.strict_json import json_text

if TYPE_CHECKING:
    from jaxmnt.storage import StoragePath


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    command = {"list": _list, "verify": _verify, "show": _show, "diff": _diff, "export": _export}[options.command]
    try:
        return command(options)
    except OSError as error:
        if isinstance(error, UserError):
            raise
        where = printable(str(error.filename or options.command))
        raise UserError(
            f"{where}: {error.strerror or error}; check that it is mounted and readable and try again"
        ) from error


def _list(options: argparse.Namespace) -> int:
    from jaxmnt.checkpoint.commit import open_checkpoint, out_of_reach, step_directories, unfinished
    from jaxmnt.checkpoint.manifest import DamagedError
    from jaxmnt.checkpoint.refs import CHECKPOINTS, checkpoint_root_of, run_id

    root = checkpoint_root_of(options.run) / CHECKPOINTS
    if not root.is_dir():
        raise ConfigError(f"{options.run} is not a run directory with checkpoints; check the path")
    run, rows = run_id(root.parent), []
    for step, path in step_directories(root):
        try:
            manifest = open_checkpoint(path, run).manifest
        except DamagedError as damage:
            rows.append((str(step), unfinished(path) or "not whole", "", "", "", str(damage)))
            continue
        loss = "" if manifest.loss is None else f"{manifest.loss:.4f}"
        rows.append((str(step), "whole", _size(manifest.bytes), loss, _date(manifest.time), _linked(path)))
    rows += [(str(step), "away", "", "", "", _linked(path)) for step, path in out_of_reach(root)]
    aside = sorted(path.name for path in root.iterdir() if "." in path.name[1:] and path.is_dir())
    if options.json:
        keys = ("step", "state", "size", "held_out_loss", "written", "why")
        checkpoints = [dict(zip(keys, row, strict=True)) for row in rows]
        print(json_text({"run": run, "checkpoints": checkpoints, "aside": aside}))
        return ExitCode.FINISHED
    print(f"run {printable(run or '(unknown)')}, {root}")
    _table([("step", "state", "size", "held-out", "written", ""), *rows])
    for name in aside:
        print(f"set aside: {printable(name)}")
    if not rows:
        print("no checkpoints")
    return ExitCode.FINISHED


def _verify(options: argparse.Namespace) -> int:
    from jaxmnt.checkpoint.commit import step_directories, unfinished
    from jaxmnt.checkpoint.export import verify
    from jaxmnt.checkpoint.manifest import DamagedError
    from jaxmnt.checkpoint.refs import CHECKPOINTS, checkpoint_root_of, locate, run_id

    path = locate(options.checkpoint, "checkpoint")
    root = path.parent if path else checkpoint_root_of(options.checkpoint) / CHECKPOINTS
    run = run_id(root.parent)
    paths = [path] if path else [path for _, path in step_directories(root)]
    if not paths:
        raise ConfigError(f"checkpoint: {options.checkpoint} has no checkpoints; check the path")
    bad = 0
    for one in paths:
        started = time.perf_counter()
        try:
            checkpoint = verify(one, run, progress)
        except DamagedError as damage:
            progress("")
            if path is None and (doing := unfinished(one)):
                print(f"{one}: no checkpoint, {doing}")
                continue
            bad += 1
            print(f"{one}: NOT WHOLE: {damage}")
            continue
        progress("")
        manifest = checkpoint.manifest
        seconds = time.perf_counter() - started
        print(f"{one}: whole, {len(manifest.arrays)} arrays, {_size(manifest.bytes)} read in {seconds:.1f} s")
    return ExitCode.FAILURE if bad else ExitCode.FINISHED


def _show(options: argparse.Namespace) -> int:
    from jaxmnt.checkpoint.manifest import to_plain
    from jaxmnt.checkpoint.refs import find

    checkpoint = find(options.checkpoint, "checkpoint")
    manifest = checkpoint.manifest
    if options.json:
        print(json_text(to_plain(manifest), sort_keys=True))
        return ExitCode.FINISHED
    print(f"{checkpoint.path}: step {manifest.step} of run {printable(manifest.run)}")
    libraries = printable(", ".join(f"{name} {number}" for name, number in sorted(manifest.libraries.items())))
    data = printable(", ".join(f"{name} {digest[:16]}" for name, digest in sorted(manifest.data.items())))
    loss = "not taken" if manifest.loss is None else f"{manifest.loss:.4f}"
    print(f"written {_date(manifest.time, seconds=True)} by jaxmnt {printable(manifest.jaxmnt)}, {libraries}")
    print(f"tokens  {manifest.tokens}, held-out loss {loss}")
    print(f"config  {manifest.config_digest[:16]}, data {data}")
    for parent in manifest.lineage:
        row = f", row {parent['row']} of the data" if "row" in parent else ""
        print(printable(f"from    step {parent['step']} of run {parent['run']} ({parent['path']}){row}"))
    _table(
        [("array", "dtype", "shape", "size", "content")]
        + [
            (name, array.dtype, "×".join(map(str, array.shape)) or "scalar", _size(array.bytes), array.content)
            for name, array in sorted(manifest.arrays.items())
        ]
    )
    return ExitCode.FINISHED


def _diff(options: argparse.Namespace) -> int:
    from jaxmnt.checkpoint.export import compare
    from jaxmnt.checkpoint.refs import find
    from jaxmnt.config.describe import MEANING

    one, other = (find(text, "checkpoint") for text in (options.first, options.second))
    first, second, found = one.manifest, other.manifest, compare(one, other)
    print(printable(f"1: step {first.step} of run {first.run}    2: step {second.step} of run {second.run}"))
    for change in found.config:
        print(printable(f"config  {change.key}: {change.before} → {change.now} ({MEANING[change.resume]})"))
    for source in sorted(first.data.keys() | second.data.keys()):
        if first.data.get(source) != second.data.get(source):
            print(f"data    {printable(source)} holds something else")
    for label, names in (("only 1", found.only_first), ("only 2", found.only_second)):
        for name in names:
            print(f"{label}  {name}")
    for name in found.other_kind:
        a, b = first.arrays[name], second.arrays[name]
        print(f"kind    {name}: {a.dtype}{list(a.shape)} → {b.dtype}{list(b.shape)}")
    print(f"content {len(found.same)} arrays are the same bit for bit, {len(found.other_content)} are not")
    if options.verbose:
        for name in found.other_content:
            print(f"content {name}")
    return ExitCode.FINISHED


def _export(options: argparse.Namespace) -> int:
    from jaxmnt.checkpoint.export import export
    from jaxmnt.checkpoint.refs import find, tokenizer_of

    if options.file_gb <= 0:
        raise ConfigError("--file-gb takes a number above 0")
    checkpoint = find(options.checkpoint, "checkpoint")
    try:
        tokenizer = tokenizer_of(options.checkpoint, checkpoint)
    except ConfigError as error:  # a run from before runs kept theirs, without its data here
        tokenizer = None
        print(f"note    the export has no tokenizer: {error}", file=sys.stderr)
    files = export(checkpoint, options.output, int(options.file_gb * 1e9), progress, tokenizer)
    progress("")
    for file in files:
        print(file)
    return ExitCode.FINISHED


def _linked(path: "StoragePath") -> str:
    from jaxmnt.storage import is_link

    return f"a link to {path.readlink()}" if isinstance(path, Path) and is_link(path) else ""


def _date(moment: float, *, seconds: bool = False) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S" if seconds else "%Y-%m-%d %H:%M", time.localtime(moment))


def _table(rows: Sequence[tuple[str, ...]]) -> None:
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _size(count: int) -> str:
    from jaxmnt.telemetry.progress import size

    return size(count)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.checkpoint", description=__doc__, codes=HERE)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, codes: Mapping[ExitCode, str] = HERE) -> Parser:
        return commands.add_parser(name, help=text, description=text, codes=codes)

    listing = add("list", "list a run's checkpoints, and which are whole as far as their files tell")
    listing.add_argument("run", metavar="RUN")
    listing.add_argument("--json", action="store_true", help="as one JSON object")
    not_whole = HERE | {ExitCode.FAILURE: "a checkpoint is not whole, or any other failure"}
    checking = add("verify", "read every array and compare it with its digest", not_whole)
    checking.add_argument("checkpoint", metavar="CHECKPOINT", help="a run means all of its checkpoints")
    showing = add("show", "show what a checkpoint says of itself")
    showing.add_argument("checkpoint", metavar="CHECKPOINT")
    showing.add_argument("--json", action="store_true", help="as one JSON object")
    differing = add("diff", "show in what two checkpoints differ")
    differing.add_argument("first", metavar="CHECKPOINT")
    differing.add_argument("second", metavar="CHECKPOINT")
    differing.add_argument("--verbose", action="store_true", help="name every array whose content differs")
    exporting = add("export", "write the parameters as safetensors")
    exporting.add_argument("checkpoint", metavar="CHECKPOINT")
    exporting.add_argument("output", type=Path, metavar="FOLDER", help="a new folder")
    exporting.add_argument("--file-gb", type=float, default=5.0, help="gigabytes a file (5)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
