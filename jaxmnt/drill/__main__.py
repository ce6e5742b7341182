"""python -m jaxmnt.drill --config FILE [--processes 2,4] [--faults NAME,NAME] [key=value …]

Injects the failures of a long run into a small version of the same config, and shows whether each was noticed,
attributed and recovered from: whether the run resumed, and ended with the losses and parameters of a run without
faults, bit for bit.
"""

import argparse
import functools
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from jaxmnt.commands import LOCAL_EXIT_CODES, Parser, path_argument, run_command
from jaxmnt.config import load_config
from jaxmnt.drill.faults import CORE_FAULTS, Fault, plan_starts, select_faults
from jaxmnt.errors import ConfigError, ExitCode


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    from jaxmnt.drill.course import prepare_drill
    from jaxmnt.drill.findings import findings, table, to_json

    if options.list:
        print("\n".join(fault.name for fault in select_faults(None)))
        return ExitCode.FINISHED
    config = load_config(options.config, options.overrides)
    counts = _counts(options.processes)
    prefix = _prefix(options.start)
    injectable = _injectable(select_faults(options.faults), prefix, named=options.faults is not None)
    if options.devices_per_process < 1:
        raise ConfigError(f"--devices-per-process: {options.devices_per_process} is not a number from 1 up; correct it")
    folder = _empty_folder(Path(options.dir or f"{config.run.dir}.drill").absolute())
    tell = functools.partial(print, flush=True, file=sys.stderr if options.json else sys.stdout)
    results = []
    for index, processes in enumerate(counts):
        only_core = index > 0 and options.faults is None
        faults = [fault for fault in injectable if not only_core or fault.name in CORE_FAULTS]
        drill_folder = folder / f"{processes}-processes"
        plan = plan_starts(faults)
        drill = prepare_drill(config, drill_folder, processes, options.devices_per_process, prefix, plan)
        tell(f"drill   {processes} processes, {len(faults)} faults, in {drill_folder}")
        baseline = drill.run_baseline()
        drill.run(tell)
        results += findings(drill, baseline)
    print(to_json(results) if options.json else table(results))
    failed = [finding for finding in results if not finding.passed]
    for finding in failed:
        tell(f"{finding.fault} with {finding.processes} processes was not handled correctly. {finding.otherwise}")
    if failed:
        tell(f"{len(failed)} of {len(results)} faults were not handled correctly; all files are kept in {folder}")
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
        raise ConfigError(f"--start: {start!r} cannot be split into arguments: {error}; fix the quotes") from error


def _injectable(faults: list[Fault], prefix: list[str], *, named: bool) -> list[Fault]:
    """Returns the faults that can be injected here. Raises `ConfigError` if one that the user named cannot."""
    impossible = [] if _can_cut_links(prefix) else [fault.name for fault in faults if fault.namespace]
    if impossible and named:
        raise ConfigError(f"--faults: {impossible[0]!r} cannot be injected here: {_CUT_NEEDS}; leave it out")
    if impossible:
        print(f"note    {', '.join(impossible)} is skipped: {_CUT_NEEDS}", file=sys.stderr)
    return [fault for fault in faults if fault.name not in impossible]


_CUT_NEEDS = "it needs unshare, ip and the right to make a network namespace, and processes on this machine"

_MARKER = "drill.txt"


def _empty_folder(folder: Path) -> Path:
    """Creates an empty folder. Replaces the folder of an earlier drill; raises `ConfigError` for any other folder."""
    if folder.exists():
        if not (folder / _MARKER).exists():
            raise ConfigError(f"--dir: {folder} exists and was not made by a drill; choose another")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / _MARKER).write_text("made by jaxmnt.drill, and removed by it\n", encoding="utf-8")
    return folder


def _can_cut_links(prefix: list[str]) -> bool:
    """Returns True if processes can run in their own network namespace: on this machine, if the kernel allows it."""
    if prefix or not shutil.which("unshare") or not shutil.which("ip"):
        return False
    trial = "unshare --map-root-user --net ip rule add pref 9 ipproto tcp sport 9 blackhole"
    return subprocess.run(trial.split(), capture_output=True).returncode == 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    codes = LOCAL_EXIT_CODES | {ExitCode.FAILURE: "the run did not recover from a fault, or any other failure"}
    parser = Parser("python -m jaxmnt.drill", description=__doc__, codes=codes)
    parser.add_argument(
        "--config", type=path_argument, metavar="FILE", required="--list" not in arguments, help="the config of the run"
    )
    parser.add_argument("--processes", default="2", metavar="N,N", help="numbers of processes; default 2")
    parser.add_argument(
        "--devices-per-process",
        type=int,
        default=1,
        help="virtual CPU devices of each process, or GPUs that it sees; default 1",
    )
    parser.add_argument("--faults", metavar="NAME,NAME", help="the faults to inject; default all (--list shows them)")
    parser.add_argument("--list", action="store_true", help="show the faults")
    parser.add_argument(
        "--dir", type=path_argument, help="folder for the drill, shared by all hosts; default RUN.DIR.drill"
    )
    parser.add_argument(
        "--start", default="", metavar="COMMAND",
        help="command that starts the processes, such as 'srun --nodes={processes} --ntasks={processes} --overlap'",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the table as JSON, and everything else to stderr")
    parser.add_argument("--keep", action="store_true", help="keep the folder even if the drill passed")
    parser.add_settings()
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    run_command(main)
