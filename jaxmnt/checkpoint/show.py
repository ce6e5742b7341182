"""The commands of `python -m jaxmnt.checkpoint`, each of which prints what it finds."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxmnt.checkpoint.average import write_average
from jaxmnt.checkpoint.commit import open_checkpoint, step_directories, unfinished_activity, unreachable_steps
from jaxmnt.checkpoint.export import export, verify
from jaxmnt.checkpoint.manifest import DamagedError, to_plain
from jaxmnt.checkpoint.refs import CHECKPOINTS, checkpoint_root_of, find, locate, roots_of, run_id, tokenizer_of
from jaxmnt.config.describe import RESUME_LABELS, changes
from jaxmnt.errors import ConfigError, ExitCode, counted, printable
from jaxmnt.output import progress
from jaxmnt.storage import StoragePath, is_link
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.progress import table
from jaxmnt.units import size


def _list(options: argparse.Namespace) -> int:
    root = checkpoint_root_of(options.run) / CHECKPOINTS
    if not root.is_dir():
        checkpoint = find(options.run, "run")  # raises an error if this is not a checkpoint either
        raise ConfigError(
            f"run: {options.run} is a checkpoint; to list all checkpoints of its run, give the directory of the run, "
            f"{checkpoint.path.parent.parent}"
        )
    run = run_id(root.parent)
    rows = []
    for step, path in step_directories(root):
        try:
            manifest = open_checkpoint(path, run).manifest
        except DamagedError as damage:
            rows.append((str(step), unfinished_activity(path) or "not whole", "", "", "", str(damage)))
            continue
        loss = "" if manifest.loss is None else f"{manifest.loss:.4f}"
        rows.append((str(step), "whole", size(manifest.bytes), loss, _format_time(manifest.time), _describe_link(path)))
    rows += [(str(step), "away", "", "", "", _describe_link(path)) for step, path in unreachable_steps(root)]
    set_aside = sorted(path.name for path in root.iterdir() if "." in path.name[1:] and path.is_dir())
    if options.json:
        keys = ("step", "state", "size", "held_out_loss", "written", "why")
        checkpoints = [dict(zip(keys, row, strict=True)) for row in rows]
        print(json_text({"run": run, "checkpoints": checkpoints, "aside": set_aside}))
        return ExitCode.FINISHED
    print(f"run {printable(run or '(unknown)')}, {root}")
    table_rows = [(step, _STATE_LABELS.get(state, state), *columns) for step, state, *columns in rows]
    _print_table([("step", "state", "size", "held-out", "written", ""), *table_rows])
    for name in set_aside:
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
    invalid_count = 0
    for directory in paths:
        started = time.perf_counter()
        try:
            checkpoint = verify(directory, run, progress)
        except DamagedError as damage:
            progress("")
            activity = unfinished_activity(directory) if path is None else None
            if activity is not None:
                print(f"{directory}: not a checkpoint ({activity})")
            else:
                invalid_count += 1
                print(f"{directory}: NOT VALID: {damage}")
            continue
        progress("")
        manifest = checkpoint.manifest
        seconds = time.perf_counter() - started
        print(f"{directory}: valid, {len(manifest.arrays)} arrays, {size(manifest.bytes)} read in {seconds:.1f} s")
    return ExitCode.FAILURE if invalid_count else ExitCode.FINISHED


def _show(options: argparse.Namespace) -> int:
    checkpoint = find(options.checkpoint, "checkpoint")
    manifest = checkpoint.manifest
    if options.json:
        print(json_text(to_plain(manifest), sort_keys=True))
        return ExitCode.FINISHED
    print(f"{checkpoint.path}: step {manifest.step} of run {printable(manifest.run)}")
    libraries = printable(", ".join(f"{name} {version}" for name, version in sorted(manifest.libraries.items())))
    data = printable(", ".join(f"{name} {digest[:16]}" for name, digest in sorted(manifest.data.items())))
    loss = "not measured" if manifest.loss is None else f"{manifest.loss:.4f}"
    print(
        f"written {_format_time(manifest.time, with_seconds=True)} by jaxmnt {printable(manifest.jaxmnt)}, {libraries}"
    )
    print(f"tokens  {manifest.tokens}, held-out loss {loss}")
    print(f"config  {manifest.config_digest[:16]}, data {data}")
    if manifest.base is not None:
        arrays = counted(len(manifest.base.arrays), "frozen array", "frozen arrays")
        print(printable(f"base    {manifest.base.source}, of which digests of {arrays} are recorded"))
    for parent in manifest.lineage:
        row = f", row {parent['row']} of the data" if "row" in parent else ""
        print(printable(f"from    step {parent['step']} of run {parent['run']} ({parent['path']}){row}"))
    _print_table(
        [("array", "dtype", "shape", "size", "content")]
        + [
            (name, array.dtype, "×".join(map(str, array.shape)) or "scalar", size(array.bytes), array.content)
            for name, array in sorted(manifest.arrays.items())
        ]
    )
    return ExitCode.FINISHED


def _diff(options: argparse.Namespace) -> int:
    """Compares two checkpoints by their manifests.

    Arrays with the same content have the same digest in any run and at any step.
    """
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
    for name in sorted(arrays_1.keys() - arrays_2.keys()):
        print(f"only 1  {name}")
    for name in sorted(arrays_2.keys() - arrays_1.keys()):
        print(f"only 2  {name}")
    comparable_names = []
    for name in sorted(arrays_1.keys() & arrays_2.keys()):
        array_1, array_2 = arrays_1[name], arrays_2[name]
        if (array_1.shape, array_1.dtype) == (array_2.shape, array_2.dtype):
            comparable_names.append(name)
        else:
            print(f"kind    {name}: {array_1.dtype}{list(array_1.shape)} → {array_2.dtype}{list(array_2.shape)}")
    if first.base != second.base:
        print("base    the frozen parameters or their sources are different")
    different_names = [name for name in comparable_names if arrays_1[name].content != arrays_2[name].content]
    equal_count = len(comparable_names) - len(different_names)
    print(f"content {equal_count} arrays are the same bit for bit, {len(different_names)} are not")
    if options.verbose:
        for name in different_names:
            print(f"content {name}")
    return ExitCode.FINISHED


def _export(options: argparse.Namespace) -> int:
    if options.file_gb <= 0:
        raise ConfigError("--file-gb must be above 0")
    checkpoint = find(options.checkpoint, "checkpoint")
    try:
        tokenizer = tokenizer_of(options.checkpoint, checkpoint)
    except ConfigError as error:  # an older run without a tokenizer of its own, whose data is not available here
        tokenizer = None
        print(f"note    the export has no tokenizer: {error}", file=sys.stderr)
    files = export(checkpoint, options.output, int(options.file_gb * 1e9), progress, tokenizer)
    progress("")
    for file in files:
        print(file)
    return ExitCode.FINISHED


def _average(options: argparse.Namespace) -> int:
    """Averages the checkpoints of the steps that the command line lists."""
    run, separator, steps = options.checkpoint.rpartition("@")
    texts = [f"{run}@{step}" for step in steps.split(",")] if separator and "," in steps else [options.checkpoint]
    checkpoints = [find(text, "checkpoint") for text in texts]
    if len({checkpoint.path for checkpoint in checkpoints}) < len(checkpoints):
        raise ConfigError(f"checkpoint: {options.checkpoint} names a step twice; name each once")
    path = write_average(checkpoints, roots_of(texts[-1], checkpoints[-1]), options.output, progress)
    progress("")
    print(f"{path}: {counted(len(checkpoints), 'checkpoint', 'checkpoints')} averaged")
    return ExitCode.FINISHED


def _describe_link(path: StoragePath) -> str:
    """Describes where a step that is a symbolic link leads; empty for other steps."""
    return f"a link to {path.readlink()}" if isinstance(path, Path) and is_link(path) else ""


def _format_time(unix_seconds: float, *, with_seconds: bool = False) -> str:
    pattern = "%Y-%m-%d %H:%M:%S" if with_seconds else "%Y-%m-%d %H:%M"
    return time.strftime(pattern, time.localtime(unix_seconds))


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    for line in table([tuple(map(printable, row)) for row in rows], right=set()):
        print(line)


_STATE_LABELS = {"whole": "valid", "not whole": "not valid"}
"""The labels in the table of `list` for states that have older names in its JSON."""


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": _list,
    "verify": _verify,
    "show": _show,
    "diff": _diff,
    "export": _export,
    "average": _average,
}
