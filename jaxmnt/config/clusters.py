"""Settings of the launchers: what a run asks of a cluster."""

import re
from typing import Any, Literal, Self

from pydantic import model_validator

from jaxmnt.config.section import Section, key

_SECRET = re.compile(r"(?i)(^|_)(secrets?|tokens?|passw\w*|credentials?|api_?key|private_?key)($|_)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Launch(Section):
    nodes: int = key(1, "Hosts of the run.", ge=1)
    spare_nodes: int = key(0, "Hosts beyond those, for going on without one that failed.", ge=0)
    gpus_per_node: int = key(8, "GPUs of a host; 0 trains on its CPU.", ge=0)
    hours: float | None = key(None, "How long a job may take; default what the cluster allows.", gt=0)
    warning_seconds: int = key(300, "How long before the end of a job the run is asked to save and stop.", ge=1)
    restarts: int = key(10, "Starts inside one allocation after the first.", ge=0)
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
        for name in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"launch.environment: {name!r} is no name of a variable; correct it")
            if _SECRET.search(name):
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
    def _one_line_each(self) -> Self:
        for name in ("options", "srun_options"):
            for option in getattr(self, name):
                if not option.startswith("-") or "\n" in option:
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
    cpu: str | None = key(None, "CPU that a pod asks for; default none.")
    memory: str | None = key(None, "Memory that a pod asks for; default none.")
    annotations: dict[str, str] = key({}, "Annotations of every pod, such as those that attach networks.")
    pod: dict[str, Any] = key({}, "Other fields of a pod's spec; what is a list is added to ours.")
