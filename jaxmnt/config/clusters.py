"""Settings of the launchers, and the patterns that recognise secrets among these settings.

Other users can read job scripts and manifests, so settings that look like secrets are refused.
"""

import math
import re
from collections.abc import Iterable
from typing import Any, Literal, Self

from pydantic import model_validator

from jaxmnt.config.section import Section, key


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that matches what any of the patterns matches."""
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


_SECRET_WORDS = _any_of(
    rf"(.*_)?{word}(_.*)?"
    for word in (
        r"\w*secrets?", r"\w*tokens?", r"\w*passw(or)?ds?", r"\w*pass(phrase|code)s?", r"credentials?", r"creds?",
        r"authorization", r"bearer", r"jwt", r"cookies?", r"webhook", r"connection_string", r"\w*(api|private)_?keys?",
    )
)  # fmt: skip
"""Names in lower case of variables that hold secrets, because of a word anywhere in the name, as in DB_PASSWORD_2."""

_SECRET_ENDINGS = _any_of(
    rf"(.*_)?{word}(_?\d+)?"
    for word in (
        r"(api|access|secret|private|ssh|auth|account|storage)?keys?", r"key_id", r"(ssh|db|pg|user|root)?pass", r"pat",
        r"o?auth2?", r"auth_(header|string|data)", r"sas", r"dsn",
    )
)  # fmt: skip
"""Names in lower case of variables that hold secrets, because of a word at the end of the name: OPENAI_KEY, GITHUB_PAT,
but not KEY_FORMAT or KEYBOARD."""

_PASSWORD_ENDING = re.compile(r".+_pwd")
"""Names that end in _PWD. PWD itself is the working directory."""

_HARMLESS_NAMES = _any_of(
    (
        # Variables of libraries that never hold secrets.
        r"(jax|xla|nccl|cuda|cudnn|cublas|omp|mkl|tf|tokenizers|ucx|fi|ofi|gloo|pmix?|ompi|slurm|pytorch|torch)_.*",
        # Counts, special tokens and switches: MAX_TOKENS, EOS_TOKEN, HF_HUB_DISABLE_IMPLICIT_TOKEN.
        r"(.*_)?(max|min|num|per|count|batch|bos|eos|pad|unk|sep|cls|mask|stop|end|start|special)_tokens?(_.*)?",
        r"(.*_)?tokens?_(per|count|limit)(_.*)?",
        r"(.*_)?(disable|enable|use|skip|require|allow|no)_.*",
        # Keys that are not credentials.
        r"(.*_)?(cache|public|sort|partition|primary|foreign|index|group|hash|lookup|config)_keys?",
        # Locations of secrets, not their contents.
        r".*_(file|path|dir|folder|sock|socket|home)", r"google_application_credentials",
    )
)  # fmt: skip
"""Names in lower case of variables that hold no secret, although they match one of the patterns above."""

_SECRET_VALUES = _any_of(
    (
        r"\bgh[pousr]_\w{16}", r"\bgithub_pat_\w{16}", r"\bglpat-[\w-]{16}", r"(?<![\w/.-])sk-[\w-]{16}",
        r"\b[sr]k_live_\w{16}", r"\b(AKIA|ASIA)[0-9A-Z]{16}\b", r"\bhf_[A-Za-z0-9]{24}",
        r"\bAIza[\w-]{30}", r"\bya29\.[\w-]{16}",
        r"\bxox[abeoprs]-[\w-]{10}", r"\bnpm_\w{30}", r"\bpypi-[\w-]{30}", r"\beyJ[\w-]{8,}\.eyJ[\w-]{8}",
        r"-----BEGIN [A-Z ]*PRIVATE KEY", r"\b[Bb]earer +[\w.~+/-]{16}",
        r"://[^/\s:@$]*:[^/\s:@$]+@",  # a password in an address, but not a variable such as $NAME
    )
)  # fmt: skip
"""Matches the first characters of the keys and tokens that services issue."""


def is_secret_name(name: str) -> bool:
    """Returns True if a variable of this name probably holds a secret, such as HF_TOKEN, openaiKey or DB_PWD."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).lower()
    if _HARMLESS_NAMES.fullmatch(name):
        return False
    return any(pattern.fullmatch(name) for pattern in (_SECRET_WORDS, _SECRET_ENDINGS, _PASSWORD_ENDING))


def contains_secret(text: str) -> bool:
    """Returns True if a text contains something that has the form of a key or token."""
    return _SECRET_VALUES.search(text) is not None


_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][-+]?\d+)?", re.ASCII)
"""A Kubernetes quantity: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/"""


class Launch(Section):
    nodes: int = key(1, "Number of hosts.", ge=1)
    spare_nodes: int = key(0, "Number of spare hosts, with which the run continues if a host fails.", ge=0)
    gpus_per_node: int = key(8, "Number of GPUs per host; 0: train on CPUs.", ge=0)
    hours: float | None = key(None, "Time limit of a job, in hours. Default: the cluster's own limit.", gt=0)
    warning_seconds: int = key(300, "How many seconds before the end of a job the run is asked to save and stop.", ge=1)
    restarts: int | None = key(
        None, "Maximum number of restarts: in each allocation on Slurm, of the entire JobSet on Kubernetes. Default: "
        "none while the run gains steps and does not fail far more often than expected.", ge=0,
    )  # fmt: skip
    wait_minutes: float | None = key(
        None, "How long the processes of a job wait for each other at a start. Default: cluster.start_timeout_seconds, "
        "but on Kubernetes 30 minutes if that is not set.", gt=0, le=1440,
    )  # fmt: skip
    environment: dict[str, str] = key({}, "Environment variables of every process. Secrets are refused.")
    setup: list[str] = key([], "Shell commands to run first on each host, such as: source /shared/env/bin/activate.")
    python: str = key("python", "Python interpreter that starts the processes.", path=True)
    image: str | None = key(None, "Container image in which jaxmnt is installed.")
    mounts: list[str] = key(
        [], "Mounts of folders in the container: HOST:CONTAINER; on GKE, of volume claims: CLAIM:CONTAINER.", path=True
    )
    settings: Literal["auto", "none"] = key(
        "auto",
        "Environment variables of XLA and NCCL for processes on GPUs. auto: our values (docs/cluster.md) for those "
        "that are not set; none: only those that are set.",
    )
    cost_per_gpu_hour: float | None = key(None, "Cost of a GPU for one hour, for estimates.", ge=0)

    @model_validator(mode="after")
    def _check_launch(self) -> Self:
        for name, value in self.environment.items():
            if not _VARIABLE_NAME.fullmatch(name):
                raise ValueError(f"launch.environment: {name!r} is not a valid variable name; correct it")
            if is_secret_name(name) or contains_secret(value):
                raise ValueError(
                    f"launch.environment: {name} looks like a secret, and scripts and manifests are readable; "
                    "keep it in a file of yours or a Kubernetes secret, and read it in launch.setup"
                )
        if self.hours is not None and 3600 * self.hours <= self.warning_seconds:
            raise ValueError(
                f"launch.hours: {self.hours:g} hours must be longer than launch.warning_seconds "
                f"({self.warning_seconds} s), or the run is stopped at once; raise launch.hours or lower "
                "launch.warning_seconds"
            )
        for mount in self.mounts:
            if not re.fullmatch(r"[^:]+:/[^:]*", mount):
                raise ValueError(f"launch.mounts: {mount!r} is not of the form FOLDER:/PATH/IN/CONTAINER; correct it")
        return self


class Slurm(Section):
    partition: str | None = key(None, "Partition (--partition).")
    account: str | None = key(None, "Account (--account).")
    qos: str | None = key(None, "Quality of service (--qos).")
    reservation: str | None = key(None, "Reservation (--reservation).")
    constraint: str | None = key(None, "Features that nodes must have (--constraint).")
    switches: str | None = key(
        None, "Maximum number of leaf switches, and how long to wait for them: 1@12:00:00 (--switches)."
    )
    options: list[str] = key(
        [], "Additional options of sbatch, such as --mail-type=END; they take precedence over ours."
    )
    srun_options: list[str] = key([], "Additional options of srun.")

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        for name in ("options", "srun_options"):
            for option in getattr(self, name):
                if not option.startswith("-"):
                    raise ValueError(f"slurm.{name}: {option!r} is not an option such as --mail-type=END; correct it")
        return self


class Gke(Section):
    namespace: str = key("default", "Namespace of the JobSet.")
    queue: str | None = key(None, "Local queue of Kueue.")
    accelerator: str = key("nvidia-h100-mega-80gb", "GKE's name for the GPU type (cloud.google.com/gke-accelerator).")
    node_selector: dict[str, str] = key({}, "Additional labels that nodes must have.")
    spot: bool = key(False, "Use spot nodes.")
    topology: str | None = key(
        None, "Label that must have the same value on all nodes, such as cloud.google.com/gke-nodepool. Default: none."
    )
    service_account: str | None = key(None, "Kubernetes service account, for access to buckets.")
    priority: str | None = key(None, "Priority class.")
    grace_seconds: int = key(300, "Seconds that a pod may take to save after SIGTERM.", ge=10)
    shared_memory_gib: int = key(64, "Size of /dev/shm.", ge=1)
    host_network: bool = key(False, "Use the node's network, as GPUDirect needs on some machine types.")
    cpu: str | int | float | None = key(None, "CPUs that a pod requests, such as 100 or 500m. Default: none.")
    memory: str | int | float | None = key(
        None, "Memory that a pod requests, such as 900Gi, or a number of bytes. Default: none."
    )
    annotations: dict[str, str] = key({}, "Annotations of every pod, such as those that attach networks.")
    pod: dict[str, Any] = key({}, "Additional fields of the pod spec; lists are appended to ours.")

    @model_validator(mode="after")
    def _check_quantities(self) -> Self:
        for name, example in (("cpu", "100 or 500m"), ("memory", "900Gi")):
            amount = getattr(self, name)
            if isinstance(amount, str):
                is_valid = _QUANTITY.fullmatch(amount) is not None
            else:
                is_valid = amount is None or 0 < amount < math.inf
            if not is_valid:
                raise ValueError(f"gke.{name}: {amount!r} must be an amount such as {example}; correct it")
        return self
