"""A job script for Slurm, and its submission."""

import os
import shlex
import subprocess
from pathlib import Path

from jaxmnt.config.load import as_override, drop_overridden
from jaxmnt.errors import ConfigError, UserError, printable
from jaxmnt.launch.job import Job, ending_on_failure, environment, filled, key_needed

_REQUEUES = 1000
_AFTER_THE_RENDEZVOUS_SECONDS = 60
_SINFO_SECONDS = 10
_OF_ANOTHER_JOB = ("SLURM_", "SBATCH_", "SRUN_")
_OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS")


def render(wanted: Job) -> str:
    """The script, for sbatch."""
    config, launch = wanted.config, wanted.config.launch
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment(config).items()]
    setup = [*ending_on_failure(launch.setup), *lines, *key_needed(wanted.flags)] or [":"]
    srun = "".join(f" {shlex.quote(option)}" for option in config.slurm.srun_options)
    wait_seconds = round(wanted.start_timeout_seconds(config.cluster.start_timeout_seconds))
    waits = [as_override("cluster.start_timeout_seconds", wait_seconds)] if launch.wait_minutes is not None else []
    return filled(
        "slurm.sh",
        options="\n".join(f"#SBATCH {shlex.quote(option)}" for option in _options(wanted)),
        directory=shlex.quote(str(Path.cwd())),
        run_dir=shlex.quote(str(wanted.run_dir)),
        frozen=shlex.quote(str(wanted.frozen_file)),
        config=shlex.quote(str(wanted.config_file)),
        arguments=shlex.join([*wanted.flags, *_settings(wanted, waits)]),
        container=shlex.join(_container(wanted)),
        sweep=_sweep(wanted),
        setup="\n".join(f"    {line}" for line in setup),
        python=shlex.quote(launch.python),
        nodes=str(launch.nodes),
        spare_nodes=str(launch.spare_nodes),
        restarts=str(launch.restarts),
        requeues=str(_REQUEUES),
        wait=str(wait_seconds + _AFTER_THE_RENDEZVOUS_SECONDS),
        limit=_limit(wanted),
        srun_options=srun,
    )


def _settings(wanted: Job, waits: list[str]) -> list[str]:
    """The settings of the command line, each once. The tasks of an array add their own run.dir."""
    settings = drop_overridden([*wanted.overrides, *waits, as_override("run.dir", str(wanted.run_dir))])
    return [setting for setting in settings if not (wanted.sweep and setting.startswith("run.dir="))]


def _options(wanted: Job) -> list[str]:
    """Of sbatch. Those of the config come last, and count more."""
    launch, slurm = wanted.config.launch, wanted.config.slurm
    log = f"{str(wanted.run_dir).replace('%', '%%')}/logs/slurm-{'%A-%a' if wanted.sweep else '%j'}.log"
    options = [
        f"--job-name=jaxmnt-{wanted.run_dir.name}",
        f"--nodes={launch.nodes + launch.spare_nodes}",
        "--ntasks-per-node=1",
        "--exclusive",
        "--mem=0",
        "--requeue",
        "--wait-all-nodes=1",  # in a cloud they may still be booting
        "--open-mode=append",
        f"--output={log}",
        f"--signal=USR1@{launch.warning_seconds}",
    ]
    if launch.spare_nodes:  # else an allocation that has lost a node is of no use
        options.append("--no-kill")
    if launch.gpus_per_node:
        options.append(f"--gpus-per-node={launch.gpus_per_node}")
    if launch.hours:
        options.append(f"--time={max(1, round(60 * launch.hours))}")
    if wanted.sweep:
        options.append(f"--array=0-{len(wanted.sweep) - 1}")
    for name in ("partition", "account", "qos", "reservation", "constraint", "switches"):
        if value := getattr(slurm, name):
            options.append(f"--{name}={value}")
    return [*options, *slurm.options]


def _limit(wanted: Job) -> str:
    """A comment on how long the job may take, where the config does not say."""
    if wanted.config.launch.hours or any(
        option.startswith(("--time=", "-t")) for option in wanted.config.slurm.options
    ):
        return ""
    partition = wanted.config.slurm.partition
    where = f"partition {partition}" if partition else "default partition"
    found = _partition_limit(partition)
    text = f"which is {printable(found)}" if found else "which sinfo --format='%P %L %l' shows (default, most)"
    return f"# launch.hours is not set, so the time limit is that of the {where}, {text}.\n"


def _partition_limit(partition: str | None) -> str | None:
    """As sinfo has it, which may not be here: the default for jobs that ask for no time, else the most."""
    asked = [f"--partition={partition}"] if partition else []
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", "--format=%P|%L|%l", *asked], capture_output=True, text=True,
            timeout=_SINFO_SECONDS, env=_environment(), check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    for line in done.stdout.splitlines():
        name, default, most = ([*line.split("|"), "", ""])[:3]
        if (name.rstrip("*") == partition or (partition is None and name.endswith("*"))) and most:
            return most if default in ("", "n/a") else f"{default} ({most} at most)"
    return None


def _container(wanted: Job) -> list[str]:
    """Options of the pyxis plugin, which starts enroot containers: https://github.com/NVIDIA/pyxis"""
    launch = wanted.config.launch
    if launch.image is None:
        return []
    inside = [mount.split(":", 1)[1] for mount in launch.mounts if len(set(mount.split(":", 1))) == 1]
    for what, path in (("run.dir", wanted.run_dir), ("the config", wanted.frozen_file)):
        if not any(path.is_relative_to(folder) for folder in inside):
            raise ConfigError(
                f"launch.mounts: {what}, {path}, must have the same path in the container; add a mount, such as "
                f"{path.parent}:{path.parent}"
            )
    mounts = [f"--container-mounts={','.join(launch.mounts)}"] if launch.mounts else []
    return [f"--container-image={launch.image}", *mounts]


def _sweep(wanted: Job) -> str:
    """In a job array each task has settings, and a run directory, of its own."""
    if not wanted.sweep:
        return ""
    lines = ["case $SLURM_ARRAY_TASK_ID in"]
    for number, point in enumerate(wanted.sweep):
        run_dir = as_override("run.dir", str(wanted.run_dir / str(number)))
        lines.append(f"    {number}) arguments+=({shlex.join([*point, run_dir])}) ;;")
    lines += ["esac", 'run_dir="$run_dir/$SLURM_ARRAY_TASK_ID"', ""]
    return "\n".join(lines)


def submit(wanted: Job) -> str:
    """Hands the script to sbatch; what that says. Raises `UserError` if it refuses."""
    try:
        (wanted.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        wanted.freeze()
    except OSError as error:
        raise ConfigError(f"run.dir: {wanted.run_dir} cannot be written: {error.strerror}; choose another") from error
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=render(wanted), env=_environment(), capture_output=True, text=True
        )
    except FileNotFoundError:
        raise ConfigError(
            "sbatch: this command is not installed here; submit from a login node, or see --dry-run"
        ) from None
    if done.returncode != 0:
        raise UserError(f"sbatch refused the job: {done.stderr.strip() or done.stdout.strip()}")
    number = done.stdout.strip().partition(";")[0]
    log = "%A-%a" if wanted.sweep else number
    return f"job {number}, log {wanted.run_dir}/logs/slurm-{log.replace('%A', number)}.log"


def _environment() -> dict[str, str]:
    """Without what an interactive job has set, which would count more than the script's options."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OF_ANOTHER_JOB) or name in _OF_THE_CLUSTER
    }
