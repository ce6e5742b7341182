"""Writes a job script for Slurm, and submits it."""

import os
import shlex
import subprocess
from pathlib import Path

from jaxmnt.config.load import as_override, drop_overridden
from jaxmnt.errors import ConfigError, UserError, printable
from jaxmnt.launch.job import Job, environment, exit_on_failure, fill_template, require_run_key

_MAX_REQUEUES = 1000
_WAIT_MARGIN_SECONDS = 60
"""Time, in addition to the time limit of the rendezvous, for which srun (--wait) lets the other tasks run after the
first has ended."""
_SINFO_TIMEOUT_SECONDS = 10
_JOB_VARIABLE_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_")
_CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS")


def render(job: Job) -> str:
    """Returns the script for sbatch."""
    config, launch = job.config, job.config.launch
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment(config).items()]
    setup = [*exit_on_failure(launch.setup), *lines, *require_run_key(job.flags)] or [":"]
    srun = "".join(f" {shlex.quote(option)}" for option in config.slurm.srun_options)
    wait_seconds = round(job.start_timeout_seconds(config.cluster.start_timeout_seconds))
    timeout_settings = (
        [as_override("cluster.start_timeout_seconds", wait_seconds)] if launch.wait_minutes is not None else []
    )
    return fill_template(
        "slurm.sh",
        options="\n".join(f"#SBATCH {shlex.quote(option)}" for option in _options(job)),
        directory=shlex.quote(str(Path.cwd())),
        run_dir=shlex.quote(str(job.run_dir)),
        frozen=shlex.quote(str(job.frozen_file)),
        config=shlex.quote(str(job.config_file)),
        arguments=shlex.join([*job.flags, *_settings(job, timeout_settings)]),
        container=shlex.join(_container_options(job)),
        sweep=_sweep_lines(job),
        setup="\n".join(f"    {line}" for line in setup),
        python=shlex.quote(launch.python),
        nodes=str(launch.nodes),
        spare_nodes=str(launch.spare_nodes),
        restarts="none" if launch.restarts is None else str(launch.restarts),
        restart_limit="as long as it gains steps" if launch.restarts is None else f"{launch.restarts} times at most",
        requeues=str(_MAX_REQUEUES),
        wait=str(wait_seconds + _WAIT_MARGIN_SECONDS),
        limit=_limit_comment(job),
        srun_options=srun,
    )


def _settings(job: Job, timeout_settings: list[str]) -> list[str]:
    """Returns the settings for the command line, each only once. The tasks of an array add their own run.dir."""
    settings = drop_overridden([*job.overrides, *timeout_settings, as_override("run.dir", str(job.run_dir))])
    return [setting for setting in settings if not (job.sweep and setting.startswith("run.dir="))]


def _options(job: Job) -> list[str]:
    """Returns the options of sbatch. Those in the config come last, so that they take precedence."""
    launch, slurm = job.config.launch, job.config.slurm
    log = f"{str(job.run_dir).replace('%', '%%')}/logs/slurm-{'%A-%a' if job.sweep else '%j'}.log"
    options = [
        f"--job-name=jaxmnt-{job.run_dir.name}",
        f"--nodes={launch.nodes + launch.spare_nodes}",
        "--ntasks-per-node=1",
        "--exclusive",
        "--mem=0",
        "--requeue",
        "--wait-all-nodes=1",  # in a cloud, nodes may still be booting
        "--open-mode=append",
        f"--output={log}",
        f"--signal=USR1@{launch.warning_seconds}",
    ]
    if launch.spare_nodes:  # without spare nodes, an allocation that has lost a node is useless
        options.append("--no-kill")
    if launch.gpus_per_node:
        options.append(f"--gpus-per-node={launch.gpus_per_node}")
    if launch.hours:
        options.append(f"--time={max(1, round(60 * launch.hours))}")
    if job.sweep:
        options.append(f"--array=0-{len(job.sweep) - 1}")
    for name in ("partition", "account", "qos", "reservation", "constraint", "switches"):
        if value := getattr(slurm, name):
            options.append(f"--{name}={value}")
    return [*options, *slurm.options]


def _limit_comment(job: Job) -> str:
    """Returns a comment for the script about the job's time limit, or an empty text if the config sets the limit."""
    if job.config.launch.hours or any(option.startswith(("--time=", "-t")) for option in job.config.slurm.options):
        return ""
    partition = job.config.slurm.partition
    where = f"partition {partition}" if partition else "default partition"
    limit = _partition_limit(partition)
    text = f"which is {printable(limit)}" if limit else "which sinfo --format='%P %L %l' shows (default, maximum)"
    return f"# launch.hours is not set, so the time limit is that of the {where}, {text}.\n"


def _partition_limit(partition: str | None) -> str | None:
    """Returns the time limit of a job that does not request one: the partition's default, or else its maximum. Returns
    None if sinfo is not available or does not report it."""
    options = [f"--partition={partition}"] if partition else []
    try:
        completed = subprocess.run(
            ["sinfo", "--noheader", "--format=%P|%L|%l", *options], capture_output=True, text=True,
            timeout=_SINFO_TIMEOUT_SECONDS, env=_environment(), check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    for line in completed.stdout.splitlines():
        name, default, maximum = ([*line.split("|"), "", ""])[:3]
        # sinfo marks the default partition with an asterisk.
        if (name.rstrip("*") == partition or (partition is None and name.endswith("*"))) and maximum:
            return maximum if default in ("", "n/a") else f"{default} ({maximum} at most)"
    return None


def _container_options(job: Job) -> list[str]:
    """Returns the options of srun that start a container with the pyxis plugin (https://github.com/NVIDIA/pyxis)."""
    launch = job.config.launch
    if launch.image is None:
        return []
    same_paths = [mount.split(":", 1)[1] for mount in launch.mounts if len(set(mount.split(":", 1))) == 1]
    for name, path in (("run.dir", job.run_dir), ("the config", job.frozen_file)):
        if not any(path.is_relative_to(folder) for folder in same_paths):
            raise ConfigError(
                f"launch.mounts: {name}, {path}, must have the same path in the container; add a mount, such as "
                f"{path.parent}:{path.parent}"
            )
    mounts = [f"--container-mounts={','.join(launch.mounts)}"] if launch.mounts else []
    return [f"--container-image={launch.image}", *mounts]


def _sweep_lines(job: Job) -> str:
    """Returns shell lines that give each task of a job array its settings and its own run directory."""
    if not job.sweep:
        return ""
    lines = ["case $SLURM_ARRAY_TASK_ID in"]
    for number, point in enumerate(job.sweep):
        run_dir = as_override("run.dir", str(job.run_dir / str(number)))
        lines.append(f"    {number}) arguments+=({shlex.join([*point, run_dir])}) ;;")
    lines += ["esac", 'run_dir="$run_dir/$SLURM_ARRAY_TASK_ID"', ""]
    return "\n".join(lines)


def submit(job: Job) -> str:
    """Submits the script with sbatch. Returns a line with the number and the log of the job. Raises `UserError` if
    sbatch rejects the script."""
    try:
        (job.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        job.freeze()
    except OSError as error:
        raise ConfigError(f"run.dir: {job.run_dir} cannot be written: {error.strerror}; choose another") from error
    try:
        completed = subprocess.run(
            ["sbatch", "--parsable"], input=render(job), env=_environment(), capture_output=True, text=True
        )
    except FileNotFoundError:
        raise ConfigError(
            "sbatch: this command is not installed here; submit from a login node, or see --dry-run"
        ) from None
    if completed.returncode != 0:
        raise UserError(f"sbatch refused the job: {completed.stderr.strip() or completed.stdout.strip()}")
    number = completed.stdout.strip().partition(";")[0]
    log = "%A-%a" if job.sweep else number
    return f"job {number}, log {job.run_dir}/logs/slurm-{log.replace('%A', number)}.log"


def _environment() -> dict[str, str]:
    """Returns our environment without the variables of a surrounding interactive job, which would override the script's
    options."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_JOB_VARIABLE_PREFIXES) or name in _CLUSTER_VARIABLES
    }
