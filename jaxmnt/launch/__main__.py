"""python -m jaxmnt.launch local --processes N -- --config FILE [key=value …]
python -m jaxmnt.launch slurm|gke --config FILE [--nodes N] [--dry-run] [--fresh] [key=value …]

Starts the processes of a run on this machine, or on a cluster with a job script or manifest, which it prints or
submits.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmnt.commands import LOCAL_EXIT_CODES, RUN_EXIT_CODES, Parser, expect_separator, path_argument, run_command
from jaxmnt.errors import ConfigError, ExitCode, remark

if TYPE_CHECKING:
    from jaxmnt.config.schema import Config


def main(arguments: list[str]) -> int:
    launch_arguments, train_arguments = _split(arguments)
    options = _parse(launch_arguments)
    if options.where == "local":
        return _local(options, train_arguments)
    if train_arguments:
        raise ConfigError(f"--: {options.where} takes no arguments after it; give settings as key=value")
    return _on_cluster(options)


def _local(options: argparse.Namespace, train_arguments: list[str]) -> int:
    from jaxmnt.launch.local import check_cores, launch, local_run
    from jaxmnt.launch.restarts import Restarts, fitting_counts

    numbers = (options.processes, options.devices_per_process or 1, options.cores_per_process or 1)
    if min(numbers) < 1 or options.max_restarts < 0:
        raise ConfigError(
            "--processes, --devices-per-process and --cores-per-process must be at least 1, --max-restarts at least 0"
        )
    check_cores(options.processes, options.cores_per_process)
    if options.preflight:
        from jaxmnt.preflight.arguments import parse_arguments

        local = local_run(train_arguments, options.devices_per_process, ("jaxmnt.preflight",), parse_arguments)
    else:
        local = local_run(train_arguments, options.devices_per_process)
    local = replace(local, cores=options.cores_per_process)
    counts = fitting_counts(options.elastic, options.processes, options.devices_per_process, local.config)
    return launch(local, options.processes, Restarts(options.max_restarts, counts))


def _on_cluster(options: argparse.Namespace) -> int:
    from jaxmnt.config.load import as_override
    from jaxmnt.launch import gke, slurm
    from jaxmnt.launch.job import cost, cost_per_hour, make_job

    cluster = slurm if options.where == "slurm" else gke
    nodes = [] if options.nodes is None else [as_override("launch.nodes", options.nodes)]
    if nodes and any(setting.startswith("launch.nodes=") for setting in options.overrides):
        raise ConfigError("--nodes: launch.nodes is also given; leave one of them out")
    flags = [
        flag for flag, is_set in (("--accept-changes", options.accept_changes), ("--fresh", options.fresh)) if is_set
    ]
    job = make_job(Path(options.config), [*options.overrides, *nodes], options.sweep, flags)
    for path in sorted(_data_paths(job.config)):
        if not _is_visible(path):
            remark(f"note: the data {path} is not visible on this machine; the job's nodes must have it")
    if options.dry_run:
        print(cluster.render(job), end="")
        return ExitCode.FINISHED
    print(cluster.submit(job))
    if cluster is slurm and (estimate := cost(job)) is not None:
        print(f"cost    up to {estimate:,.0f} if the job runs to its time limit")
    elif cluster is gke and (estimate := cost_per_hour(job)) is not None:
        print(f"cost    {estimate:,.2f} an hour; the job has no time limit")
    return ExitCode.FINISHED


def _data_paths(config: "Config") -> set[str]:
    """Returns the paths of the data that the run trains on and evaluates."""
    paths = {source.path for source in config.data.named_sources.values() if source.path is not None}
    return paths | {eval_set.path for eval_set in config.data.eval_sets.values()}


def _is_visible(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # for example a folder that may not be entered
        return False


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Splits the arguments at a lone `--`."""
    if "--" not in arguments:
        return arguments, []
    separator = arguments.index("--")
    return arguments[:separator], arguments[separator + 1 :]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.launch", description=__doc__, codes=RUN_EXIT_CODES)
    where = parser.add_subparsers(dest="where", required=True)
    _add_local(where)
    clusters = {
        "slurm": _add_cluster(where, "slurm", "a Slurm job"),
        "gke": _add_cluster(where, "gke", "a Kubernetes JobSet"),
    }
    if arguments and arguments[0] in clusters:  # subparsers do not support settings between options
        namespace = argparse.Namespace(where=arguments[0])
        return clusters[arguments[0]].parse_intermixed_args(arguments[1:], namespace)
    if arguments[:1] == ["local"]:
        expect_separator(arguments, "local --processes 2 -- --config FILE train.steps=20")
    return parser.parse_args(arguments)


def _add_local(where: "argparse._SubParsersAction[Parser]") -> None:
    local = where.add_parser(
        "local",
        help="several processes on this machine",
        usage="%(prog)s --processes N [--devices-per-process K] [--cores-per-process K] [--max-restarts R] "
        "[--elastic MIN:MAX] [--preflight] -- --config FILE [key=value ...]",
        codes=RUN_EXIT_CODES,
    )
    local.add_argument("--processes", type=int, required=True, help="number of processes")
    local.add_argument(
        "--devices-per-process", type=int, help="virtual CPU devices of each process; default: no virtual devices"
    )
    local.add_argument(
        "--cores-per-process", type=int, help="CPU cores that each process is bound to; default on CPUs: an equal share"
    )
    local.add_argument(
        "--max-restarts", type=int, default=0, help="maximum number of restarts after failures; default 0"
    )
    local.add_argument(
        "--elastic",
        metavar="MIN:MAX",
        help="continue with fewer processes, down to MIN, when a restart makes no progress",
    )
    local.add_argument(
        "--preflight",
        action="store_true",
        help="check the hosts instead; arguments after -- go to jaxmnt.preflight",
    )


def _add_cluster(where: "argparse._SubParsersAction[Parser]", name: str, text: str) -> Parser:
    cluster = where.add_parser(name, help=text, description=text, codes=LOCAL_EXIT_CODES)
    cluster.add_argument("--config", type=path_argument, required=True, metavar="FILE", help="the config of the run")
    cluster.add_argument("--nodes", type=int, metavar="N", help="number of hosts; overrides the config's launch.nodes")
    cluster.add_argument("--dry-run", action="store_true", help="print what would be submitted, and do not submit it")
    cluster.add_argument(
        "--sweep", action="append", default=[], metavar="key=VALUE,VALUE",
        help="submit a job array with a run for each value, or combination of values",
    )  # fmt: skip
    cluster.add_argument(
        "--accept-changes", action="store_true", help="continue a run although changes of the config alter its maths"
    )
    cluster.add_argument(
        "--fresh",
        action="store_true",
        help="set the run in run.dir aside, and begin a new one; once for the whole job",
    )
    cluster.add_settings()
    return cluster


if __name__ == "__main__":
    run_command(main)
