"""Settings of the launchers: what a run asks of a cluster."""

import math
import re
from typing import Any, Literal, Self

from pydantic import model_validator

from jaxmnt.config.secrets import holds_a_secret, is_secret_name
from jaxmnt.config.section import Section, key

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_AMOUNT = re.compile(r"(\d+\.?\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][-+]?\d+)?", re.ASCII)
"""Of Kubernetes: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/"""


class Launch(Section):
    nodes: int = key(1, "Hosts of the run.", ge=1)
    spare_nodes: int = key(0, "Hosts beyond those, for going on without one that failed.", ge=0)
    gpus_per_node: int = key(8, "GPUs of a host; 0 trains on its CPU.", ge=0)
    hours: float | None = key(None, "How long a job may take; default what the cluster allows.", gt=0)
    warning_seconds: int = key(300, "How long before the end of a job the run is asked to save and stop.", ge=1)
    restarts: int = key(10, "Starts inside one allocation after the first.", ge=0)
    wait_minutes: float | None = key(
        None, "How long the processes of a job wait for each other at a start; default on Slurm "
        "cluster.start_timeout_seconds, on Kubernetes 30 unless that is given.", gt=0, le=1440,
    )  # fmt: skip
    environment: dict[str, str] = key({}, "Variables for every process; no secrets.")
    setup: list[str] = key([], "Shell lines that come first on each host, such as: source /shared/env/bin/activate.")
    python: str = key("python", "The interpreter.")
    image: str | None = key(None, "Container image that has jaxmnt in it.")
    mounts: list[str] = key([], "Folders in the container: HOST:CONTAINER; on GKE volume claims, CLAIM:CONTAINER.")
    settings: Literal["auto", "none"] = key(
        "auto", "XLA and NCCL settings for several GPU hosts (docs/cluster.md); what environment says counts more."
    )
    cost_per_gpu_hour: float | None = key(None, "What an hour of a GPU costs, for the estimate.", ge=0)

    @model_validator(mode="after")
    def _fit_to_print(self) -> Self:
        for name, value in self.environment.items():
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"launch.environment: {name!r} is no name of a variable; correct it")
            if is_secret_name(name) or holds_a_secret(value):
                raise ValueError(
                    f"launch.environment: {name} looks like a secret, and scripts and manifests are readable; "
                    "keep it in a file of yours or a Kubernetes secret, and read it in launch.setup"
                )
        if self.hours is not None and 3600 * self.hours <= self.warning_seconds:
            raise ValueError(
                f"launch.hours: {self.hours:g} are less than launch.warning_seconds ({self.warning_seconds}), and the "
                "run would be stopped at once; raise one or lower the other"
            )
        for mount in self.mounts:
            if not re.fullmatch(r"[^:]+:/[^:]*", mount):
                raise ValueError(f"launch.mounts: {mount!r} is not FOLDER:/PATH/IN/CONTAINER; correct it")
        return self


class Slurm(Section):
    partition: str | None = key(None, "Partition (--partition).")
    account: str | None = key(None, "Account (--account).")
    qos: str | None = key(None, "Quality of service (--qos).")
    reservation: str | None = key(None, "Reservation (--reservation).")
    constraint: str | None = key(None, "Features that nodes must have (--constraint).")
    switches: str | None = key(None, "Leaf switches at most, and how long to wait for them: 1@12:00:00 (--switches).")
    options: list[str] = key([], "Any other options of sbatch, such as --mail-type=END. They count more than ours.")
    srun_options: list[str] = key([], "Any other options of srun.")

    @model_validator(mode="after")
    def _options_only(self) -> Self:
        for name in ("options", "srun_options"):
            for option in getattr(self, name):
                if not option.startswith("-"):
                    raise ValueError(f"slurm.{name}: {option!r} is no option such as --mail-type=END; correct it")
        return self


class Gke(Section):
    namespace: str = key("default", "Namespace of the JobSet.")
    queue: str | None = key(None, "Local queue of Kueue.")
    accelerator: str = key("nvidia-h100-mega-80gb", "GKE's name of the GPU (cloud.google.com/gke-accelerator).")
    node_selector: dict[str, str] = key({}, "Other labels that nodes must have.")
    spot: bool = key(False, "Use spot nodes.")
    topology: str | None = key(
        None, "Label whose value all nodes shall share, such as cloud.google.com/gke-nodepool; default none."
    )
    service_account: str | None = key(None, "Kubernetes service account, for access to buckets.")
    priority: str | None = key(None, "Priority class.")
    grace_seconds: int = key(300, "Time for a save after SIGTERM.", ge=10)
    shared_memory_gib: int = key(64, "Size of /dev/shm.", ge=1)
    host_network: bool = key(False, "Use the node's network, as GPUDirect needs on some machine types.")
    cpu: str | int | float | None = key(None, "CPU that a pod asks for, such as 100 or 500m; default none.")
    memory: str | int | float | None = key(None, "Memory that a pod asks for, such as 900Gi, or bytes; default none.")
    annotations: dict[str, str] = key({}, "Annotations of every pod, such as those that attach networks.")
    pod: dict[str, Any] = key({}, "Other fields of a pod's spec; what is a list is added to ours.")

    @model_validator(mode="after")
    def _amounts(self) -> Self:
        for name, example in (("cpu", "100 or 500m"), ("memory", "900Gi")):
            amount = getattr(self, name)
            fits = _AMOUNT.fullmatch(amount) if isinstance(amount, str) else amount is None or 0 < amount < math.inf
            if not fits:
                raise ValueError(f"gke.{name}: {amount!r} must be an amount such as {example}; correct it")
        return self
