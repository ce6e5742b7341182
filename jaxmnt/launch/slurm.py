"""Writes a job script for Slurm, and submits it."""

import os
import shlex
import subprocess
from pathlib import Path

from jaxmnt.config.load import as_override, drop_overridden
from jaxmnt.errors import ConfigError, UserError, printable
from jaxmnt.launch.job import Job, environment, exit_on_failure, fill_template, require_run_key

_REQUEUES = 1000
_AFTER_THE_RENDEZVOUS_SECONDS = 60
_SINFO_SECONDS = 10
_JOB_VARIABLE_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_")
_CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS")


def render(job: Job) -> str:
    """Returns the script for sbatch."""
    config, launch = job.config, job.config.launch
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment(config).items()]
    setup = [*exit_on_failure(launch.setup), *lines, *require_run_key(job.flags)] or [":"]
    srun = "".join(f" {shlex.quote(option)}" for option in config.slurm.srun_options)
    wait_seconds = round(job.start_timeout_seconds(config.cluster.start_timeout_seconds))
    waits = [as_override("cluster.start_timeout_seconds", wait_seconds)] if launch.wait_minutes is not None else []
    return fill_template(
        "slurm.sh",
        options="\n".join(f"#SBATCH {shlex.quote(option)}" for option in _options(job)),
        directory=shlex.quote(str(Path.cwd())),
        run_dir=shlex.quote(str(job.run_dir)),
        frozen=shlex.quote(str(job.frozen_file)),
        config=shlex.quote(str(job.config_file)),
        arguments=shlex.join([*job.flags, *_settings(job, waits)]),
        container=shlex.join(_container(job)),
        sweep=_sweep(job),
        setup="\n".join(f"    {line}" for line in setup),
        python=shlex.quote(launch.python),
        nodes=str(launch.nodes),
        spare_nodes=str(launch.spare_nodes),
        restarts=str(launch.restarts),
        requeues=str(_REQUEUES),
        wait=str(wait_seconds + _AFTER_THE_RENDEZVOUS_SECONDS),
        limit=_limit(job),
        srun_options=srun,
    )


def _settings(job: Job, waits: list[str]) -> list[str]:
    """Returns the settings for the command line, each once. The tasks of an array add their own run.dir."""
    settings = drop_overridden([*job.overrides, *waits, as_override("run.dir", str(job.run_dir))])
    return [setting for setting in settings if not (job.sweep and setting.startswith("run.dir="))]


def _options(job: Job) -> list[str]:
    """Returns the options of sbatch. Those of the config come last, so that they take precedence."""
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


def _limit(job: Job) -> str:
    """Returns a comment for the script on the job's time limit if the config does not set one."""
    if job.config.launch.hours or any(option.startswith(("--time=", "-t")) for option in job.config.slurm.options):
        return ""
    partition = job.config.slurm.partition
    where = f"partition {partition}" if partition else "default partition"
    limit = _partition_limit(partition)
    text = f"which is {printable(limit)}" if limit else "which sinfo --format='%P %L %l' shows (default, most)"
    return f"# launch.hours is not set, so the time limit is that of the {where}, {text}.\n"


def _partition_limit(partition: str | None) -> str | None:
    """Returns the time limit of a job that requests none: the partition's default, else its maximum. None if sinfo is
    not available or does not report it."""
    options = [f"--partition={partition}"] if partition else []
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%P|%L|%l", *options], capture_output=True, text=True,
            timeout=_SINFO_SECONDS, env=_environment(), check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    for line in done.stdout.splitlines():
        name, default, most = ([*line.split("|"), "", ""])[:3]
        # sinfo marks the default partition with an asterisk.
        if (name.rstrip("*") == partition or (partition is None and name.endswith("*"))) and most:
            return most if default in ("", "n/a") else f"{default} ({most} at most)"
    return None


def _container(job: Job) -> list[str]:
    """Returns options of the pyxis plugin, which starts enroot containers: https://github.com/NVIDIA/pyxis"""
    launch = job.config.launch
    if launch.image is None:
        return []
    inside = [mount.split(":", 1)[1] for mount in launch.mounts if len(set(mount.split(":", 1))) == 1]
    for what, path in (("run.dir", job.run_dir), ("the config", job.frozen_file)):
        if not any(path.is_relative_to(folder) for folder in inside):
            raise ConfigError(
                f"launch.mounts: {what}, {path}, must have the same path in the container; add a mount, such as "
                f"{path.parent}:{path.parent}"
            )
    mounts = [f"--container-mounts={','.join(launch.mounts)}"] if launch.mounts else []
    return [f"--container-image={launch.image}", *mounts]


def _sweep(job: Job) -> str:
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
    """Submits the script with sbatch. Returns a line with the job's number and log. Raises `UserError` if sbatch
    rejects it."""
    try:
        (job.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        job.freeze()
    except OSError as error:
        raise ConfigError(f"run.dir: {job.run_dir} cannot be written: {error.strerror}; choose another") from error
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=render(job), env=_environment(), capture_output=True, text=True
        )
    except FileNotFoundError:
        raise ConfigError(
            "sbatch: this command is not installed here; submit from a login node, or see --dry-run"
        ) from None
    if done.returncode != 0:
        raise UserError(f"sbatch refused the job: {done.stderr.strip() or done.stdout.strip()}")
    number = done.stdout.strip().partition(";")[0]
    log = "%A-%a" if job.sweep else number
    return f"job {number}, log {job.run_dir}/logs/slurm-{log.replace('%A', number)}.log"


def _environment() -> dict[str, str]:
    """Returns our environment without the variables of an enclosing interactive job, which would override the script's
    options."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_JOB_VARIABLE_PREFIXES) or name in _CLUSTER_VARIABLES
    }
