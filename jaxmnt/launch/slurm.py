"""A job script for Slurm, and its submission."""

import re
import shlex
import subprocess
from importlib.resources import files
from pathlib import Path

from jaxmnt.config.schema import Config
from jaxmnt.errors import ConfigError, UserError
from jaxmnt.launch.job import Job
from jaxmnt.launch.settings import environment


def render(wanted: Job) -> str:
    """The script, for sbatch."""
    config, launch = wanted.config, wanted.config.launch
    template = files("jaxmnt.launch").joinpath("templates/slurm.sh").read_text(encoding="utf-8")
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment(config).items()]
    setup = [*launch.setup, *lines] or [":"]
    srun = "".join(f" {shlex.quote(option)}" for option in config.slurm.srun_options)
    return _filled(
        template,
        options="\n".join(f"#SBATCH {shlex.quote(option)}" for option in _options(wanted)),
        directory=shlex.quote(str(Path.cwd())),
        run_dir=shlex.quote(str(wanted.run_dir)),
        arguments=shlex.join(["--config", str(wanted.config_file), *wanted.overrides, f"run.dir={wanted.run_dir}"]),
        container=shlex.join(_container(config)),
        sweep=_sweep(wanted),
        setup="\n".join(f"    {line}" for line in setup),
        python=shlex.quote(launch.python),
        nodes=str(launch.nodes),
        restarts=str(launch.restarts),
        srun_options=srun,
    )


def _filled(template: str, **values: str) -> str:
    """With `@name@` replaced by a value: what else there is belongs to the shell."""
    return re.sub(r"@(\w+)@", lambda slot: values[slot[1]], template)


def _options(wanted: Job) -> list[str]:
    """Of sbatch. Those of the config come last, and count more."""
    launch, slurm = wanted.config.launch, wanted.config.slurm
    log = f"{wanted.run_dir}/logs/slurm-{'%A-%a' if wanted.sweep else '%j'}.log"
    options = [
        f"--job-name=jaxmnt-{wanted.run_dir.name}",
        f"--nodes={launch.nodes + launch.spare_nodes}",
        "--ntasks-per-node=1",
        "--exclusive",
        "--mem=0",
        "--no-kill",
        "--requeue",
        "--open-mode=append",
        f"--output={log}",
        f"--signal=USR1@{launch.warning_seconds}",
    ]
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


def _container(config: Config) -> list[str]:
    """Options of the pyxis plugin, which starts enroot containers: https://github.com/NVIDIA/pyxis"""
    launch = config.launch
    if launch.image is None:
        return []
    mounts = [f"--container-mounts={','.join(launch.mounts)}"] if launch.mounts else []
    return [f"--container-image={launch.image}", *mounts]


def _sweep(wanted: Job) -> str:
    """In a job array each task has settings, and a run directory, of its own."""
    if not wanted.sweep:
        return ""
    lines = ["case $SLURM_ARRAY_TASK_ID in"]
    for number, point in enumerate(wanted.sweep):
        lines.append(f"    {number}) arguments+=({shlex.join(point)}) ;;")
    lines += ["esac", 'run_dir="$run_dir/$SLURM_ARRAY_TASK_ID"', 'arguments+=("run.dir=$run_dir")', ""]
    return "\n".join(lines)


def submit(wanted: Job) -> str:
    """Hands the script to sbatch; what that says. Raises `UserError` if it refuses."""
    try:
        (wanted.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir: {wanted.run_dir}/logs cannot be made: {error.strerror}; choose another") from error
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=render(wanted), capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError("sbatch: there is no such command here; submit from a login node, or see --dry-run") from None
    if done.returncode != 0:
        raise UserError(f"sbatch refused the job: {done.stderr.strip() or done.stdout.strip()}")
    number = done.stdout.strip().partition(";")[0]
    log = "%A-%a" if wanted.sweep else number
    return f"job {number}, log {wanted.run_dir}/logs/slurm-{log.replace('%A', number)}.log"
