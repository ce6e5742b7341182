"""python -m jaxmnt.bench scaling --config FILE --processes 1,2,4 [key=value …]

Runs a config on rising numbers of processes, on this machine or as Slurm jobs, and measures the efficiency: with the
same number of rows per device (weak scaling) and with the same total number of rows (strong scaling). On Slurm, a
process is a node. The batch of the config is that of the first number. Predicted step times are shown as well; on CPUs
they use rates that are measured first.
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
        processes=_counts(options.processes),
        modes=("weak", "strong") if options.mode == "both" else (options.mode,), steps=options.steps,
        rounds=options.rounds, folder=options.output or config.run_dir / FOLDER,
        devices_per_process=options.devices_per_process, cores_per_process=options.cores_per_process,
        slurm=options.slurm, calibration=options.calibration, predicts=not options.no_prediction,
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


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(","))
    if len(counts) < 2 or list(counts) != sorted(set(counts)) or counts[0] < 1:
        numbers = ",".join(map(str, counts))
        raise ConfigError(f"--processes: {numbers} must be two or more rising numbers from 1 up, such as 1,2,4")
    return counts


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.bench", description=__doc__, codes=LOCAL_EXIT_CODES)
    parser.add_argument("what", choices=["scaling"], help="the benchmark to run")
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="the config of the run")
    parser.add_argument("--processes", required=True, metavar="N,N…", help="rising numbers, such as 1,2,4")
    parser.add_argument("--mode", choices=["weak", "strong", "both"], default="both", help="default: both")
    parser.add_argument(
        "--steps", type=int, default=30, help="steps of each run; the last two thirds count; default 30"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds; each runs every case once; default 3")
    parser.add_argument("--slurm", action="store_true", help="submit Slurm jobs and wait for them")
    parser.add_argument(
        "--devices-per-process", type=int, metavar="K", help="GPUs or virtual CPU devices of each process"
    )
    parser.add_argument("--cores-per-process", type=int, metavar="K", help="bind each process to K cores of its own")
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="predict steps by these rates (from preflight --calibrate)"
    )
    parser.add_argument("--no-prediction", action="store_true", help="predict no step times, and measure no rates")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="folder for the study and its runs; default run.dir/scaling"
    )
    parser.add_argument("--json", action="store_true", help="print the study as JSON instead of tables")
    parser.add_settings()
    options = parser.parse_intermixed_args(arguments)
    for name, minimum in (("steps", 6), ("rounds", 1), ("devices_per_process", 1), ("cores_per_process", 1)):
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise ConfigError(f"--{name.replace('_', '-')}: {value} must be {minimum} or more; correct it")
    if options.slurm and (options.devices_per_process or options.cores_per_process):
        raise ConfigError(
            "--slurm: --devices-per-process and --cores-per-process apply to this machine only; leave them out"
        )
    return options


if __name__ == "__main__":
    run_command(main)
