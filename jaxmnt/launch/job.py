"""A job: what is asked of a cluster, with which environment, and in which text it may be written."""

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


def ending_on_failure(setup: list[str]) -> list[str]:
    """Lines of the shell that end it when one of the given ones fails."""
    return [f"eval {shlex.quote(line)} || exit 1" for line in setup]


def key_needed(flags: list[str]) -> list[str]:
    """Lines of the shell that end it where --fresh would begin the run anew at each restart: only by the key of the
    run, which is one for all its restarts there, does a process know that it is done (run/fresh.py)."""
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


def filled(name: str, **values: str) -> str:
    """Returns a template with `@name@` replaced by a value: what else there is belongs to the shell."""
    return re.sub(r"@(\w+)@", lambda slot: values[slot[1]], template(name))


def environment(config: Config) -> dict[str, str]:
    """What the launchers write into scripts and manifests, sorted by name. What GPUs need besides, each process sets
    itself (`distributed/gpu_settings.py`)."""
    launch = config.launch
    more = {"JAXMNT_IMAGE": launch.image} if launch.image else {}
    if launch.gpus_per_node:
        more["JAX_PLATFORMS"] = "cuda,cpu"  # a host whose GPUs are not found must not train on its CPU
    return dict(sorted((more | launch.environment).items()))


def check_batch(config: Config, devices: int) -> None:
    """Raises `ConfigError`, naming global batch sizes that do fit, if the mesh or the batch does not come out whole.

    The global batch stays whatever the number of devices; the passes that a step takes follow from it.
    """
    try:
        num_microbatches(config, resolve_sizes(config.mesh, devices))
    except ConfigError as error:
        raise ConfigError(f"{error} (launch.nodes and launch.gpus_per_node make {devices} devices)") from error


def check_rendered(what: dict[str, Any]) -> None:
    """Raises `ConfigError`, with its dotted key, for a text that could become other lines of a script, or that others
    should not read, and for a value that has no form in a manifest, such as a date.

    Every text of a job goes through this, so that none depends on how it is quoted.
    """
    _check("", what)


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
    """Raises `ConfigError` if these fields, as in a pod's spec, set a variable whose name is that of a secret."""
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
            "be printed, since it becomes part of a script or manifest; remove them, or make each line an item"
        )
    if contains_secret(text):
        raise ConfigError(
            f"{where}: its value looks like a secret, and scripts and manifests are readable; keep it in a file of "
            "yours or a Kubernetes secret, and read it in launch.setup"
        )


_ONE_FOR_ALL = ("launch", "slurm", "gke")
"""Sections that say what the job is, of which there is one script."""


@dataclass(frozen=True)
class Job:
    """What is asked for."""

    config: Config
    config_file: Path
    overrides: list[str]
    """Settings over the file's, for every process."""
    sweep: list[list[str]]
    """More settings for each task of a job array, with a checkpoint.dir of its own; empty for a single job."""
    flags: list[str]
    """Of jaxmnt.train, such as --fresh."""

    @property
    def run_dir(self) -> Path:
        return self.config.run_dir.absolute()

    @property
    def frozen_file(self) -> Path:
        """Where the config file is kept as it was when the job was asked for: it may wait, and be requeued."""
        digest = hashlib.sha256(config_bytes(self.config_file)).hexdigest()[:8]
        return self.run_dir / "launch" / f"{self.config_file.stem}-{digest}.yaml"

    def start_timeout_seconds(self, default: float) -> float:
        """How long its processes wait for each other at a start."""
        if self.config.launch.wait_minutes is not None:
            return 60 * self.config.launch.wait_minutes
        given = "start_timeout_seconds" in self.config.cluster.model_fields_set
        return self.config.cluster.start_timeout_seconds if given else default

    def freeze(self) -> None:
        """Writes it. Raises `OSError`."""
        self.frozen_file.parent.mkdir(parents=True, exist_ok=True)
        publish_bytes(self.frozen_file, config_bytes(self.config_file))


def job(config_file: Path, overrides: list[str], sweep: list[str], flags: Sequence[str] = ()) -> Job:
    """Raises `ConfigError` for a config that does not fit the nodes, also with the settings of a sweep, and for texts
    that a script or manifest must not hold."""
    points = _points(sweep)
    config = load_config(config_file, overrides)
    for number, point in enumerate(points or [[]]):
        tried = load_config(config_file, [*overrides, *point])
        if points and tried.checkpoint.dir:
            # One place for all would hold one run, and the second task would find it finished.
            own = f"{tried.checkpoint.dir.rstrip('/')}/{number}"
            point[:] = drop_overridden([*point, as_override("checkpoint.dir", own)])
        devices = tried.launch.nodes * max(1, tried.launch.gpus_per_node)
        check_batch(tried, devices)
        check_rendered(tried.model_dump())
    of_points = {setting.partition("=")[0] for point in points for setting in point}
    of_all_tasks = [setting for setting in drop_overridden(overrides) if setting.partition("=")[0] not in of_points]
    wanted = Job(config, config_file.absolute(), of_all_tasks, points, list(flags))
    places = {"run.dir": wanted.run_dir, "--config": wanted.config_file, "this folder": Path.cwd()}
    check_rendered(places | {"overrides": overrides, "--sweep": points})
    return wanted


def _points(sweep: list[str]) -> list[list[str]]:
    """`["a=1,2", "b=3,4"]`: a=1 b=3, a=1 b=4, a=2 b=3, a=2 b=4."""
    choices = []
    for text in sweep:
        name, equals, values = text.partition("=")
        if not equals or not name or not all(values.split(",")):
            raise ConfigError(f"--sweep: {text!r} is not key=VALUE,VALUE; correct it")
        if name.partition(".")[0] in _ONE_FOR_ALL:
            raise ConfigError(f"--sweep: {name} is one for all tasks of a job; give it as {name}=VALUE")
        if name == "run.dir":
            raise ConfigError("--sweep: run.dir is one already for each task, by its number; leave it out")
        choices.append([f"{name}={value}" for value in values.split(",")])
    return [list(point) for point in product(*choices)] if choices else []


def cost(wanted: Job) -> float | None:
    """Of all GPUs of all its tasks until the time limit; None if that, or their price, is not known."""
    launch = wanted.config.launch
    if launch.cost_per_gpu_hour is None or launch.hours is None:
        return None
    gpus = (launch.nodes + launch.spare_nodes) * launch.gpus_per_node * max(1, len(wanted.sweep))
    return gpus * launch.hours * launch.cost_per_gpu_hour


def cost_per_hour(wanted: Job) -> float | None:
    """Of all GPUs of a JobSet, which has no time limit and no spare nodes; None if their price is not known."""
    launch = wanted.config.launch
    price = launch.cost_per_gpu_hour
    return None if price is None else launch.nodes * launch.gpus_per_node * price
