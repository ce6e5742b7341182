"""python -m jaxmnt.drill --config FILE [--processes 2,4] [--faults NAME,NAME] [key=value …]

Injects the failures of a long run into a small version of the same config. Shows whether each failure was noticed and
attributed correctly, and whether the run recovered: it must resume, and end with exactly the losses and parameters of a
run without faults, bit for bit.
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
    from jaxmnt.drill.findings import as_json, as_table, evaluate_drill

    if options.list:
        print("\n".join(fault.name for fault in select_faults(None)))
        return ExitCode.FINISHED
    config = load_config(options.config, options.overrides)
    counts = _parse_process_counts(options.processes)
    start_command = _split_start_command(options.start)
    injectable = _keep_injectable(
        select_faults(options.faults), start_command, chosen_by_user=options.faults is not None
    )
    if options.devices_per_process < 1:
        raise ConfigError(f"--devices-per-process: must be at least 1, not {options.devices_per_process}")
    folder = _empty_folder(Path(options.dir or f"{config.run.dir}.drill").absolute())
    print_line = functools.partial(print, flush=True, file=sys.stderr if options.json else sys.stdout)
    findings = []
    for index, processes in enumerate(counts):
        only_core = index > 0 and options.faults is None
        faults = [fault for fault in injectable if not only_core or fault.name in CORE_FAULTS]
        drill_folder = folder / f"{processes}-processes"
        plan = plan_starts(faults)
        drill = prepare_drill(config, drill_folder, processes, options.devices_per_process, start_command, plan)
        print_line(f"drill   {processes} processes, {len(faults)} faults, in {drill_folder}")
        baseline = drill.run_baseline()
        drill.run(print_line)
        findings += evaluate_drill(drill, baseline)
    print(as_json(findings) if options.json else as_table(findings))
    failed = [finding for finding in findings if not finding.passed]
    for finding in failed:
        print_line(
            f"{finding.fault} with {finding.processes} processes was not handled correctly. {finding.last_events}"
        )
    if failed:
        print_line(
            f"{len(failed)} of {len(findings)} faults were not handled correctly; all files are kept in {folder}"
        )
        return ExitCode.FAILURE
    if not options.keep:
        shutil.rmtree(folder)
    return ExitCode.FINISHED


def _parse_process_counts(text: str) -> list[int]:
    """Returns the numbers of processes in a comma-separated list. Raises `ConfigError` if the list is not valid."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 2 or len(set(counts)) < len(counts):
        raise ConfigError(f"--processes: {text!r} is not a list of different numbers, each at least 2, such as 2,4")
    return counts


def _split_start_command(command: str) -> list[str]:
    """Returns the arguments of the command that starts processes. Raises `ConfigError` for unbalanced quotes."""
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--start: {command!r} cannot be split into arguments: {error}; fix the quotes") from error


def _keep_injectable(faults: list[Fault], start_command: list[str], *, chosen_by_user: bool) -> list[Fault]:
    """Returns the faults that can be injected here.

    Raises `ConfigError` if the user chose the faults, and one of them cannot be injected.
    """
    impossible = [] if _can_cut_links(start_command) else [fault.name for fault in faults if fault.namespace]
    if impossible and chosen_by_user:
        raise ConfigError(
            f"--faults: {impossible[0]!r} cannot be injected here, because {_CUT_REQUIREMENTS}; leave it out"
        )
    if impossible:
        print(f"note    {', '.join(impossible)} is skipped, because {_CUT_REQUIREMENTS}", file=sys.stderr)
    return [fault for fault in faults if fault.name not in impossible]


_CUT_REQUIREMENTS = (
    "it needs the commands unshare and ip, permission to create a network namespace, and all processes on this machine"
)
"""Why a fault that cuts links cannot be injected everywhere."""

_MARKER_FILE = "drill.txt"
"""File that identifies a folder as made by a drill."""


def _empty_folder(folder: Path) -> Path:
    """Creates an empty folder. Replaces the folder of an earlier drill; raises `ConfigError` for any other folder."""
    if folder.exists():
        if not (folder / _MARKER_FILE).exists():
            raise ConfigError(f"--dir: {folder} exists and was not made by a drill; choose another folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / _MARKER_FILE).write_text(
        "made by jaxmnt.drill, which may delete this folder with everything in it\n", encoding="utf-8"
    )
    return folder


def _can_cut_links(start_command: list[str]) -> bool:
    """Returns True if the processes of the drill can run in their own network namespace.

    They can if they start on this machine, and the kernel and the installed commands allow it.
    """
    if start_command or not shutil.which("unshare") or not shutil.which("ip"):
        return False
    command = "unshare --map-root-user --net ip rule add pref 9 ipproto tcp sport 9 blackhole"
    return subprocess.run(command.split(), capture_output=True).returncode == 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    codes = LOCAL_EXIT_CODES | {ExitCode.FAILURE: "the run did not recover from a fault, or something else failed"}
    parser = Parser("python -m jaxmnt.drill", description=__doc__, codes=codes)
    parser.add_argument(
        "--config", type=path_argument, metavar="FILE", required="--list" not in arguments, help="the config of the run"
    )
    parser.add_argument("--processes", default="2", metavar="N,N", help="numbers of processes to drill with; default 2")
    parser.add_argument(
        "--devices-per-process",
        type=int,
        default=1,
        help="number of virtual CPU devices for each process, or of GPUs that it sees; default 1",
    )
    parser.add_argument("--faults", metavar="NAME,NAME", help="the faults to inject; default all (--list shows them)")
    parser.add_argument("--list", action="store_true", help="list the faults and exit")
    parser.add_argument(
        "--dir", type=path_argument, help="folder for the drill, shared by all hosts; default RUN.DIR.drill"
    )
    parser.add_argument(
        "--start", default="", metavar="COMMAND",
        help="command that starts the processes, such as 'srun --nodes={processes} --ntasks={processes} --overlap'",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the table as JSON, and everything else to stderr")
    parser.add_argument("--keep", action="store_true", help="keep the folder even if the drill passes")
    parser.add_settings()
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    run_command(main)
