"""A job for a cluster, with its settings and its environment, and checks of all text in its script or manifest."""

import hashlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

from jaxmnt.config.clusters import contains_secret, is_secret_name
from jaxmnt.config.load import as_override, config_bytes, drop_overridden, load_config
from jaxmnt.config.schema import Config
from jaxmnt.distributed.authentication import RUN_KEY
from jaxmnt.errors import ConfigError, ExitCode, printable
from jaxmnt.parallel.axes import num_microbatches, resolve_sizes
from jaxmnt.storage import publish_bytes


def exit_on_failure(setup: list[str]) -> list[str]:
    """Returns shell lines that run the given lines, and exit when one of them fails."""
    return [f"eval {shlex.quote(line)} || exit 1" for line in setup]


def require_run_key(flags: list[str]) -> list[str]:
    """Returns shell lines that exit if --fresh is given but the run's key is not set.

    The key is the same for all restarts, so a process can tell from it that --fresh was done before (run/fresh.py).
    Without the key, each restart would begin the run anew.
    """
    if "--fresh" not in flags:
        return []
    text = (
        f"jaxmnt: --fresh: {RUN_KEY} is not set, so a restart could not tell that --fresh was done before; pass it "
        "to the processes (docs/cluster.md), or launch without --fresh"
    )
    return [f'[ -n "${RUN_KEY}" ] || {{ echo {shlex.quote(text)} >&2; exit {int(ExitCode.CONFIG)}; }}']


def template(name: str) -> str:
    """Returns the text of a file in templates/."""
    return files("jaxmnt.launch").joinpath(f"templates/{name}").read_text(encoding="utf-8")


def fill_template(name: str, **values: str) -> str:
    """Returns a template with each `@name@` replaced by its value. All other text belongs to the shell."""
    return re.sub(r"@(\w+)@", lambda slot: values[slot[1]], template(name))


def environment(config: Config) -> dict[str, str]:
    """Returns the variables that launchers write into scripts and manifests, sorted by name. Each
    process sets further variables for GPUs itself (`distributed/gpu_settings.py`)."""
    launch = config.launch
    variables = {"JAXMNT_IMAGE": launch.image} if launch.image else {}
    if launch.gpus_per_node:
        variables["JAX_PLATFORMS"] = "cuda,cpu"  # a host whose GPUs are not found must not train on its CPU
    return dict(sorted((variables | launch.environment).items()))


def check_batch(config: Config, devices: int) -> None:
    """Raises `ConfigError`, naming global batch sizes that would fit, if the devices cannot form the mesh or the batch
    cannot be split evenly among them.

    The global batch does not depend on the number of devices; the number of microbatches follows from both.
    """
    try:
        num_microbatches(config, resolve_sizes(config.mesh, devices))
    except ConfigError as error:
        raise ConfigError(f"{error} (launch.nodes and launch.gpus_per_node make {devices} devices)") from error


def check_rendered(fields: dict[str, Any]) -> None:
    """Raises `ConfigError`, with the dotted key, for a text that could inject lines into a script or looks like a
    secret, and for a value that a manifest cannot hold, such as a date.

    Every text of a job is checked here, so that safety never depends on quoting.
    """
    _check("", fields)


def _check(where: str, value: Any) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise ConfigError(f"{where}: the key {name!r} must be a text; put it in quotes")
            _check_text(where, name)
            _check(f"{where}.{printable(name)}" if where else name, item)
        _check_variable(where, value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check(where, item)
    elif isinstance(value, (str, Path)):
        _check_text(where, str(value))
    elif not (value is None or isinstance(value, (bool, int, float))):
        raise ConfigError(f"{where}: {value!r} must be a text, a number or a boolean; put it in quotes")


def _check_variable(where: str, fields: dict[str, Any]) -> None:
    """Raises `ConfigError` if the fields of a mapping, such as one in a pod's spec, set a variable whose name is that
    of a secret."""
    name = fields.get("name")
    if isinstance(name, str) and fields.get("value") and is_secret_name(name):
        raise ConfigError(
            f"{where}: {printable(name)} looks like a secret, and scripts and manifests are readable; take its "
            "value from a Kubernetes secret (valueFrom)"
        )


def _check_text(where: str, text: str) -> None:
    if not text.isprintable():
        raise ConfigError(
            f"{where}: '{printable(text)}' must have no line ends, control characters or other characters that cannot "
            "be printed, since it becomes part of a script or manifest; remove them, or make each line a list item"
        )
    if contains_secret(text):
        raise ConfigError(
            f"{where}: its value looks like a secret, and scripts and manifests are readable; keep it in a file of "
            "yours or a Kubernetes secret, and read it in launch.setup"
        )


_JOB_SECTIONS = ("launch", "slurm", "gke")
"""Config sections that describe the job as a whole, and are therefore the same for all tasks of its one script."""


@dataclass(frozen=True)
class Job:
    """A job for a cluster, or a job array with several tasks."""

    config: Config
    config_file: Path
    overrides: list[str]
    """Settings that override those of the config file, for every process."""
    sweep: list[list[str]]
    """Further settings for each task of a job array, including a separate checkpoint.dir; empty for a single job."""
    flags: list[str]
    """Flags of jaxmnt.train, such as --fresh."""

    @property
    def run_dir(self) -> Path:
        return self.config.run_dir.absolute()

    @property
    def frozen_file(self) -> Path:
        """Path of the copy of the config file that is made at submission, since the job may wait and be requeued."""
        digest = hashlib.sha256(config_bytes(self.config_file)).hexdigest()[:8]
        return self.run_dir / "launch" / f"{self.config_file.stem}-{digest}.yaml"

    def start_timeout_seconds(self, default: float) -> float:
        """Returns how long the job's processes wait for each other at a start; `default` if the config does not say."""
        if self.config.launch.wait_minutes is not None:
            return 60 * self.config.launch.wait_minutes
        is_set = "start_timeout_seconds" in self.config.cluster.model_fields_set
        return self.config.cluster.start_timeout_seconds if is_set else default

    def freeze(self) -> None:
        """Writes `frozen_file`. Raises `OSError`."""
        self.frozen_file.parent.mkdir(parents=True, exist_ok=True)
        publish_bytes(self.frozen_file, config_bytes(self.config_file))


def make_job(config_file: Path, overrides: list[str], sweep: list[str], flags: Sequence[str] = ()) -> Job:
    """Returns the job of a config.

    Raises `ConfigError` if the config does not fit the nodes with the settings of some task of a sweep, or if it has
    text that a script or manifest must not contain.
    """
    points = _points(sweep)
    config = load_config(config_file, overrides)
    for number, point in enumerate(points or [[]]):
        task_config = load_config(config_file, [*overrides, *point])
        if points and task_config.checkpoint.dir:
            # Tasks that shared a folder would share its run, so the second task would find the run finished.
            task_folder = f"{task_config.checkpoint.dir.rstrip('/')}/{number}"
            point[:] = drop_overridden([*point, as_override("checkpoint.dir", task_folder)])
        devices = task_config.launch.nodes * max(1, task_config.launch.gpus_per_node)
        check_batch(task_config, devices)
        check_rendered(task_config.model_dump())
    swept_keys = {setting.partition("=")[0] for point in points for setting in point}
    shared = [setting for setting in drop_overridden(overrides) if setting.partition("=")[0] not in swept_keys]
    job = Job(config, config_file.absolute(), shared, points, list(flags))
    paths = {"run.dir": job.run_dir, "--config": job.config_file, "this folder": Path.cwd()}
    check_rendered(paths | {"overrides": overrides, "--sweep": points})
    return job


def _points(sweep: list[str]) -> list[list[str]]:
    """Returns all combinations of a sweep's settings. For `["a=1,2", "b=3,4"]` they are a=1 b=3, a=1 b=4, a=2 b=3 and
    a=2 b=4."""
    choices = []
    for text in sweep:
        name, equals, values = text.partition("=")
        if not equals or not name or not all(values.split(",")):
            raise ConfigError(f"--sweep: {text!r} is not key=VALUE,VALUE; correct it")
        if name.partition(".")[0] in _JOB_SECTIONS:
            raise ConfigError(f"--sweep: {name} must be the same for all tasks of a job; give it as {name}=VALUE")
        if name == "run.dir":
            raise ConfigError("--sweep: each task has its own run.dir already, by its number; leave it out")
        choices.append([f"{name}={value}" for value in values.split(",")])
    return [list(point) for point in product(*choices)] if choices else []


def cost(job: Job) -> float | None:
    """Returns what the GPUs of all tasks cost if the job runs to its time limit; None if the limit or the price is not
    known."""
    launch = job.config.launch
    if launch.cost_per_gpu_hour is None or launch.hours is None:
        return None
    gpus = (launch.nodes + launch.spare_nodes) * launch.gpus_per_node * max(1, len(job.sweep))
    return gpus * launch.hours * launch.cost_per_gpu_hour


def cost_per_hour(job: Job) -> float | None:
    """Returns the cost per hour of all GPUs in a JobSet; None if their price is not known. A JobSet has no time limit
    and no spare nodes."""
    launch = job.config.launch
    price = launch.cost_per_gpu_hour
    return None if price is None else launch.nodes * launch.gpus_per_node * price
