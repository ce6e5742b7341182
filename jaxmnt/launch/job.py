"""What is asked of a cluster: a config, on so many nodes."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from jaxmnt.config.load import load_config
from jaxmnt.config.schema import Config
from jaxmnt.errors import ConfigError
from jaxmnt.launch.fit import check_batch
from jaxmnt.launch.rendered import check_rendered

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
    flags: list[str] = field(default_factory=list)
    """Of jaxmnt.train, such as --fresh."""

    @property
    def run_dir(self) -> Path:
        assert self.config.run.dir is not None
        return Path(self.config.run.dir).absolute()

    @property
    def frozen_file(self) -> Path:
        """Where the config file is kept as it was when the job was asked for: it may wait, and be requeued."""
        digest = hashlib.sha256(self.config_file.read_bytes()).hexdigest()[:8]
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
        self.frozen_file.write_bytes(self.config_file.read_bytes())


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
            point.append(f"checkpoint.dir={json.dumps(own, ensure_ascii=False)}")
        devices = tried.launch.nodes * max(1, tried.launch.gpus_per_node)
        check_batch(tried, devices)
        check_rendered(tried.model_dump())
    wanted = Job(config, config_file.absolute(), overrides, points, list(flags))
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
