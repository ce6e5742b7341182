"""The commands of `python -m jaxmnt.checkpoint`, which print what they find."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxmnt.checkpoint.commit import open_checkpoint, step_directories, unfinished, unreachable_steps
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
        checkpoint = find(options.run, "run")  # raises an error that says what is missing
        raise ConfigError(
            f"run: {options.run} is a checkpoint; give the directory of its run to list all of them, "
            f"{checkpoint.path.parent.parent}"
        )
    run = run_id(root.parent)
    rows = []
    for step, path in step_directories(root):
        try:
            manifest = open_checkpoint(path, run).manifest
        except DamagedError as damage:
            rows.append((str(step), unfinished(path) or "not whole", "", "", "", str(damage)))
            continue
        loss = "" if manifest.loss is None else f"{manifest.loss:.4f}"
        rows.append((str(step), "whole", size(manifest.bytes), loss, _date(manifest.time), _linked(path)))
    rows += [(str(step), "away", "", "", "", _linked(path)) for step, path in unreachable_steps(root)]
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
    for directory in paths:
        started = time.perf_counter()
        try:
            checkpoint = verify(directory, run, progress)
        except DamagedError as damage:
            progress("")
            if path is None and (doing := unfinished(directory)):
                print(f"{directory}: no checkpoint, {doing}")
                continue
            bad += 1
            print(f"{directory}: NOT WHOLE: {damage}")
            continue
        progress("")
        manifest = checkpoint.manifest
        seconds = time.perf_counter() - started
        print(f"{directory}: whole, {len(manifest.arrays)} arrays, {size(manifest.bytes)} read in {seconds:.1f} s")
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
    """Compares two checkpoints by their manifests: equal contents have equal digests in any run and at any step."""
    checkpoint_1, checkpoint_2 = (find(text, "checkpoint") for text in (options.first, options.second))
    config_changes = changes(checkpoint_1.config, checkpoint_2.config)
    first, second = checkpoint_1.manifest, checkpoint_2.manifest
    print(printable(f"1: step {first.step} of run {first.run}    2: step {second.step} of run {second.run}"))
    for change in config_changes:
        print(printable(f"config  {change.key}: {change.values} ({RESUME_LABELS[change.resume]})"))
    for source in sorted(first.data.keys() | second.data.keys()):
        if first.data.get(source) != second.data.get(source):
            print(f"data    {printable(source)} has different content")
    arrays_1, arrays_2 = first.arrays, second.arrays
    for label, names in (("only 1", arrays_1.keys() - arrays_2.keys()), ("only 2", arrays_2.keys() - arrays_1.keys())):
        for name in sorted(names):
            print(f"{label}  {name}")
    comparable = []
    for name in sorted(arrays_1.keys() & arrays_2.keys()):
        a, b = arrays_1[name], arrays_2[name]
        if (a.shape, a.dtype) == (b.shape, b.dtype):
            comparable.append(name)
        else:
            print(f"kind    {name}: {a.dtype}{list(a.shape)} → {b.dtype}{list(b.shape)}")
    different = [name for name in comparable if arrays_1[name].content != arrays_2[name].content]
    print(f"content {len(comparable) - len(different)} arrays are the same bit for bit, {len(different)} are not")
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
    except ConfigError as error:  # an older run without its own tokenizer, whose data is not available here
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
