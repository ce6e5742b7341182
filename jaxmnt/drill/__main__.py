"""python -m jaxmnt.drill --config FILE [--processes 2,4] [--faults NAME,NAME] [key=value …]

Forces the failures of a long run on the same config made small, and shows whether each was noticed, named and made
good: whether the run came back and ended with the losses and parameters of one that nobody disturbed, bit for bit.
"""

import argparse
import functools
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from jaxmnt.commands import HERE, Parser, path_argument, run_command
from jaxmnt.config import load_config
from jaxmnt.drill.faults import WITH_MORE, Fault, chosen, starts
from jaxmnt.errors import ConfigError, ExitCode


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    from jaxmnt.drill.course import prepared
    from jaxmnt.drill.findings import findings, table, to_json

    if options.list:
        print("\n".join(fault.name for fault in chosen(None)))
        return ExitCode.FINISHED
    config = load_config(options.config, options.overrides)
    counts, prefix = _counts(options.processes), _prefix(options.start)
    possible = _possible(chosen(options.faults), prefix, named=options.faults is not None)
    if options.devices_per_process < 1:
        raise ConfigError(f"--devices-per-process: {options.devices_per_process} is not a number from 1 up; correct it")
    folder = _fresh(Path(options.dir or f"{config.run.dir}.drill").absolute())
    tell = functools.partial(print, flush=True, file=sys.stderr if options.json else sys.stdout)
    found = []
    for number, processes in enumerate(counts):
        less = number and options.faults is None
        faults = [fault for fault in possible if not less or fault.name in WITH_MORE]
        place = folder / f"{processes}-processes"
        drill = prepared(config, place, processes, options.devices_per_process, prefix, starts(faults))
        tell(f"drill   {processes} processes, {len(faults)} faults, in {place}")
        undisturbed = drill.undisturbed()
        drill.run(tell)
        found += findings(drill, undisturbed)
    print(to_json(found) if options.json else table(found))
    bad = [one for one in found if not one.well]
    for one in bad:
        tell(f"{one.fault} with {one.processes} processes did not go well. {one.otherwise}")
    if bad:
        tell(f"{len(bad)} of {len(found)} faults did not go well; everything is kept in {folder}")
        return ExitCode.FAILURE
    if not options.keep:
        shutil.rmtree(folder)
    return ExitCode.FINISHED


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 2 or len(set(counts)) < len(counts):
        raise ConfigError(f"--processes: {text!r} is not a list of different numbers from 2 up, such as 2,4")
    return counts


def _prefix(start: str) -> list[str]:
    try:
        return shlex.split(start)
    except ValueError as error:
        raise ConfigError(f"--start: {start!r} cannot be taken apart: {error}; fix the quotes") from error


def _possible(faults: list[Fault], prefix: list[str], *, named: bool) -> list[Fault]:
    """Those that can be caused here. Raises `ConfigError` if one that was named cannot."""
    impossible = [] if _may_cut(prefix) else [fault.name for fault in faults if fault.namespace]
    if impossible and named:
        raise ConfigError(f"--faults: {impossible[0]!r} cannot be caused here: {_CUTTING}; leave it out")
    if impossible:
        print(f"note    {', '.join(impossible)} is not tried: {_CUTTING}", file=sys.stderr)
    return [fault for fault in faults if fault.name not in impossible]


_CUTTING = "it needs unshare, ip and the right to make a network namespace, and processes on this machine"

_MARK = "drill.txt"


def _fresh(folder: Path) -> Path:
    """An empty folder. One that an earlier drill has left is emptied; anything else is not touched."""
    if folder.exists():
        if not (folder / _MARK).exists():
            raise ConfigError(f"--dir: {folder} exists and is not a drill's; choose another")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / _MARK).write_text("made by jaxmnt.drill, and removed by it\n", encoding="utf-8")
    return folder


def _may_cut(prefix: list[str]) -> bool:
    """Whether processes can be put into a network of their own: on this machine, where the kernel lets us."""
    if prefix or not shutil.which("unshare") or not shutil.which("ip"):
        return False
    try_it = "unshare --map-root-user --net ip rule add pref 9 ipproto tcp sport 9 blackhole"
    return subprocess.run(try_it.split(), capture_output=True).returncode == 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    codes = HERE | {ExitCode.FAILURE: "a fault was not made good, or any other failure"}
    parser = Parser("python -m jaxmnt.drill", description=__doc__, codes=codes)
    parser.add_argument(
        "--config", type=path_argument, metavar="FILE", required="--list" not in arguments, help="the config of the run"
    )
    parser.add_argument("--processes", default="2", metavar="N,N", help="with how many processes; default 2")
    parser.add_argument(
        "--devices-per-process",
        type=int,
        default=1,
        help="virtual CPU devices of each, or the GPUs that each sees; default 1",
    )
    parser.add_argument("--faults", metavar="NAME,NAME", help="which faults; default all (--list shows them)")
    parser.add_argument("--list", action="store_true", help="show the faults")
    parser.add_argument(
        "--dir", type=path_argument, help="folder for the drill, which all hosts share; default RUN.DIR.drill"
    )
    parser.add_argument(
        "--start", default="", metavar="COMMAND",
        help="what starts the processes elsewhere, such as 'srun --nodes={processes} --ntasks={processes} --overlap'",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the table as JSON, and all else to stderr")
    parser.add_argument("--keep", action="store_true", help="keep the folder also if all went well")
    parser.add_settings()
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    run_command(main)
