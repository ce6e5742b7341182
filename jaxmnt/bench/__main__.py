"""python -m jaxmnt.bench scaling --config FILE --processes 1,2,4 [key=value …]

Runs a config on increasing numbers of processes, on this machine or as Slurm jobs, and measures the efficiency of weak
scaling (the number of rows per device stays the same) and of strong scaling (the total number of rows stays the same).
On Slurm, each process is a node. The first run uses the batch size of the config. The study also shows predicted step
times; on CPUs, the rates that they are based on are measured first.
"""

import argparse
import sys
from pathlib import Path

from jaxmnt.commands import LOCAL_EXIT_CODES, Parser, run_command, write_file
from jaxmnt.config import load_config
from jaxmnt.errors import ConfigError, ExitCode, printable


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    from jaxmnt.bench.scaling import ScalingRequest, check, measure
    from jaxmnt.report.scaling import FILE, FOLDER, as_text, draw

    config = load_config(options.config, options.overrides)
    request = ScalingRequest(
        config_file=options.config, config=config, overrides=tuple(options.overrides),
        processes=_parse_increasing_counts(options.processes),
        modes=("weak", "strong") if options.mode == "both" else (options.mode,), steps=options.steps,
        rounds=options.rounds, folder=options.output or config.run_dir / FOLDER,
        devices_per_process=options.devices_per_process, cores_per_process=options.cores_per_process,
        slurm=options.slurm, calibration=options.calibration, should_predict=not options.no_prediction,
    )  # fmt: skip
    check(request)
    study = measure(request, lambda text: print(text, file=sys.stderr, flush=True))
    write_file(request.folder / FILE, study.model_dump_json(indent=1) + "\n")
    picture = request.folder / "scaling.svg"
    write_file(picture, draw(study))
    if options.json:
        print(study.model_dump_json(indent=1))
        return ExitCode.FINISHED
    print(as_text(study))
    print(f"\nstudy   {printable(str(request.folder / FILE))}\npicture {printable(str(picture))}")
    return ExitCode.FINISHED


def _parse_increasing_counts(text: str) -> tuple[int, ...]:
    """Returns the numbers of processes in a comma-separated list. Raises `ConfigError` unless they increase."""
    counts = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(","))
    if len(counts) < 2 or list(counts) != sorted(set(counts)) or counts[0] < 1:
        numbers = ",".join(map(str, counts))
        raise ConfigError(
            f"--processes: {numbers} must be two or more increasing numbers, each at least 1, such as 1,2,4"
        )
    return counts


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.bench", description=__doc__, codes=LOCAL_EXIT_CODES)
    parser.add_argument("benchmark", choices=["scaling"], help="the benchmark to run")
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="the config of the run")
    parser.add_argument(
        "--processes", required=True, metavar="N,N…", help="increasing numbers of processes, such as 1,2,4"
    )
    parser.add_argument(
        "--mode", choices=["weak", "strong", "both"], default="both", help="kind of scaling to measure; default both"
    )
    parser.add_argument(
        "--steps", type=int, default=30, help="steps of each run, of which the last two thirds are measured; default 30"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each of which runs every case once; default 3")
    parser.add_argument("--slurm", action="store_true", help="submit Slurm jobs and wait for them")
    parser.add_argument(
        "--devices-per-process", type=int, metavar="K", help="number of GPUs or virtual CPU devices for each process"
    )
    parser.add_argument("--cores-per-process", type=int, metavar="K", help="bind each process to its own K cores")
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="rates for predicting step times, a file that preflight --calibrate wrote",
    )
    parser.add_argument(
        "--no-prediction", action="store_true", help="do not predict step times, and do not measure rates"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="folder for the study and its runs; default run.dir/scaling"
    )
    parser.add_argument("--json", action="store_true", help="print the study as JSON instead of as tables")
    parser.add_settings()
    options = parser.parse_intermixed_args(arguments)
    minimums = {"steps": 6, "rounds": 1, "devices_per_process": 1, "cores_per_process": 1}
    for name, minimum in minimums.items():
        number = getattr(options, name)
        if number is not None and number < minimum:
            raise ConfigError(f"--{name.replace('_', '-')}: must be at least {minimum}, not {number}")
    if options.slurm and (options.devices_per_process or options.cores_per_process):
        raise ConfigError(
            "--slurm: --devices-per-process and --cores-per-process apply only to this machine; leave them out"
        )
    return options


if __name__ == "__main__":
    run_command(main)
