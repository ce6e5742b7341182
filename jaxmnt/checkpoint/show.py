"""What `python -m jaxmnt.checkpoint` prints of checkpoints."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxmnt.checkpoint.commit import open_checkpoint, out_of_reach, step_directories, unfinished
from jaxmnt.checkpoint.export import export, verify
from jaxmnt.checkpoint.manifest import DamagedError, to_plain
from jaxmnt.checkpoint.refs import CHECKPOINTS, checkpoint_root_of, find, locate, run_id, tokenizer_of
from jaxmnt.config.describe import RESUME_LABELS, changes
from jaxmnt.errors import ConfigError, ExitCode, printable
from jaxmnt.output import progress
from jaxmnt.storage import StoragePath, is_link
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.progress import table
from jaxmnt.units import size


def _list(options: argparse.Namespace) -> int:
    root = checkpoint_root_of(options.run) / CHECKPOINTS
    if not root.is_dir():
        checkpoint = find(options.run, "run")  # raises what is missing
        raise ConfigError(
            f"run: {options.run} is a checkpoint; give the directory of its run to list all of them, "
            f"{checkpoint.path.parent.parent}"
        )
    run, rows = run_id(root.parent), []
    for step, path in step_directories(root):
        try:
            manifest = open_checkpoint(path, run).manifest
        except DamagedError as damage:
            rows.append((str(step), unfinished(path) or "not whole", "", "", "", str(damage)))
            continue
        loss = "" if manifest.loss is None else f"{manifest.loss:.4f}"
        rows.append((str(step), "whole", size(manifest.bytes), loss, _date(manifest.time), _linked(path)))
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
        print(f"{one}: whole, {len(manifest.arrays)} arrays, {size(manifest.bytes)} read in {seconds:.1f} s")
    return ExitCode.FAILURE if bad else ExitCode.FINISHED


def _show(options: argparse.Namespace) -> int:
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
            (name, array.dtype, "×".join(map(str, array.shape)) or "scalar", size(array.bytes), array.content)
            for name, array in sorted(manifest.arrays.items())
        ]
    )
    return ExitCode.FINISHED


def _diff(options: argparse.Namespace) -> int:
    """By the manifests alone: the digest of a content is the same in any run and at any step."""
    one, other = (find(text, "checkpoint") for text in (options.first, options.second))
    first, second, config_changes = one.manifest, other.manifest, changes(one.config, other.config)
    print(printable(f"1: step {first.step} of run {first.run}    2: step {second.step} of run {second.run}"))
    for change in config_changes:
        print(printable(f"config  {change.key}: {change.values} ({RESUME_LABELS[change.resume]})"))
    for source in sorted(first.data.keys() | second.data.keys()):
        if first.data.get(source) != second.data.get(source):
            print(f"data    {printable(source)} holds something else")
    before, now = first.arrays, second.arrays
    for label, names in (("only 1", before.keys() - now.keys()), ("only 2", now.keys() - before.keys())):
        for name in sorted(names):
            print(f"{label}  {name}")
    alike = []
    for name in sorted(before.keys() & now.keys()):
        a, b = before[name], now[name]
        if (a.shape, a.dtype) == (b.shape, b.dtype):
            alike.append(name)
        else:
            print(f"kind    {name}: {a.dtype}{list(a.shape)} → {b.dtype}{list(b.shape)}")
    different = [name for name in alike if before[name].content != now[name].content]
    print(f"content {len(alike) - len(different)} arrays are the same bit for bit, {len(different)} are not")
    if options.verbose:
        for name in different:
            print(f"content {name}")
    return ExitCode.FINISHED


def _export(options: argparse.Namespace) -> int:
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


def _linked(path: StoragePath) -> str:
    return f"a link to {path.readlink()}" if isinstance(path, Path) and is_link(path) else ""


def _date(moment: float, *, seconds: bool = False) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S" if seconds else "%Y-%m-%d %H:%M", time.localtime(moment))


def _table(rows: Sequence[tuple[str, ...]]) -> None:
    for line in table([tuple(map(printable, row)) for row in rows], right=set()):
        print(line)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": _list,
    "verify": _verify,
    "show": _show,
    "diff": _diff,
    "export": _export,
}
