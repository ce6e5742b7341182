"""Settings of the launchers, and the patterns that recognise secrets among them.

Others can read job scripts and manifests, so settings that look like secrets are refused.
"""

import math
import re
from collections.abc import Iterable
from typing import Any, Literal, Self

from pydantic import model_validator

from jaxmnt.config.section import Section, key


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


_SECRET_WORDS = _any_of(
    rf"(.*_)?{word}(_.*)?"
    for word in (
        r"\w*secrets?", r"\w*tokens?", r"\w*passw(or)?ds?", r"\w*pass(phrase|code)s?", r"credentials?", r"creds?",
        r"authorization", r"bearer", r"jwt", r"cookies?", r"webhook", r"connection_string", r"\w*(api|private)_?keys?",
    )
)  # fmt: skip
"""Words in lower case that mark a variable as a secret anywhere in its name, such as DB_PASSWORD_2."""

_SECRET_ENDINGS = _any_of(
    rf"(.*_)?{word}(_?\d+)?"
    for word in (
        r"(api|access|secret|private|ssh|auth|account|storage)?keys?", r"key_id", r"(ssh|db|pg|user|root)?pass", r"pat",
        r"o?auth2?", r"auth_(header|string|data)", r"sas", r"dsn",
    )
)  # fmt: skip
"""Words that mark a secret only at the end of a name: OPENAI_KEY, GITHUB_PAT, but not KEY_FORMAT or KEYBOARD."""

_PASSWORD_ENDING = re.compile(r".+_pwd")
"""Requires a prefix, because PWD alone is the working directory."""

_HARMLESS_NAMES = _any_of(
    (
        # Libraries whose variables never hold secrets.
        r"(jax|xla|nccl|cuda|cudnn|cublas|omp|mkl|tf|tokenizers|ucx|fi|ofi|gloo|pmix?|ompi|slurm|pytorch|torch)_.*",
        # Counts, special tokens and switches: MAX_TOKENS, EOS_TOKEN, HF_HUB_DISABLE_IMPLICIT_TOKEN.
        r"(.*_)?(max|min|num|per|count|batch|bos|eos|pad|unk|sep|cls|mask|stop|end|start|special)_tokens?(_.*)?",
        r"(.*_)?tokens?_(per|count|limit)(_.*)?",
        r"(.*_)?(disable|enable|use|skip|require|allow|no)_.*",
        # Keys that are not credentials.
        r"(.*_)?(cache|public|sort|partition|primary|foreign|index|group|hash|lookup|config)_keys?",
        # Locations instead of contents.
        r".*_(file|path|dir|folder|sock|socket|home)", r"google_application_credentials",
    )
)  # fmt: skip
"""Names that match the patterns above although they hold no secret."""

_SECRET_VALUES = _any_of(
    (
        r"\bgh[pousr]_\w{16}", r"\bgithub_pat_\w{16}", r"\bglpat-[\w-]{16}", r"(?<![\w/.-])sk-[\w-]{16}",
        r"\b[sr]k_live_\w{16}", r"\b(AKIA|ASIA)[0-9A-Z]{16}\b", r"\bhf_[A-Za-z0-9]{24}",
        r"\bAIza[\w-]{30}", r"\bya29\.[\w-]{16}",
        r"\bxox[abeoprs]-[\w-]{10}", r"\bnpm_\w{30}", r"\bpypi-[\w-]{30}", r"\beyJ[\w-]{8,}\.eyJ[\w-]{8}",
        r"-----BEGIN [A-Z ]*PRIVATE KEY", r"\b[Bb]earer +[\w.~+/-]{16}",
        r"://[^/\s:@$]*:[^/\s:@$]+@",  # a password in an address, unless it is filled in later: $NAME
    )
)  # fmt: skip
"""Beginnings of the keys and tokens that services issue."""


def is_secret_name(name: str) -> bool:
    """Returns True if a variable of this name would hold a secret: HF_TOKEN, openaiKey, DB_PWD."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).lower()
    if _HARMLESS_NAMES.fullmatch(name):
        return False
    return any(pattern.fullmatch(name) for pattern in (_SECRET_WORDS, _SECRET_ENDINGS, _PASSWORD_ENDING))


def contains_secret(text: str) -> bool:
    """Returns True if part of a text has the form of a key or token."""
    return _SECRET_VALUES.search(text) is not None


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][-+]?\d+)?", re.ASCII)
"""A Kubernetes quantity: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/"""


class Launch(Section):
    nodes: int = key(1, "Hosts of the run.", ge=1)
    spare_nodes: int = key(0, "Extra hosts, so that the run can continue without a failed one.", ge=0)
    gpus_per_node: int = key(8, "GPUs of a host; 0 trains on its CPU.", ge=0)
    hours: float | None = key(None, "Time limit of a job, in hours; default: the cluster's own limit.", gt=0)
    warning_seconds: int = key(300, "How long before the end of a job the run is asked to save and stop.", ge=1)
    restarts: int = key(10, "Most restarts: inside each allocation on Slurm, of the whole JobSet on Kubernetes.", ge=0)
    wait_minutes: float | None = key(
        None, "How long the processes of a job wait for each other at a start; default on Slurm "
        "cluster.start_timeout_seconds, on Kubernetes 30 unless that is given.", gt=0, le=1440,
    )  # fmt: skip
    environment: dict[str, str] = key({}, "Variables for every process; no secrets.")
    setup: list[str] = key([], "Shell lines to run first on each host, such as: source /shared/env/bin/activate.")
    python: str = key("python", "The interpreter.", path=True)
    image: str | None = key(None, "Container image that has jaxmnt in it.")
    mounts: list[str] = key(
        [], "Folders in the container: HOST:CONTAINER; on GKE volume claims, CLAIM:CONTAINER.", path=True
    )
    settings: Literal["auto", "none"] = key(
        "auto",
        "What a process on GPUs sets for XLA and NCCL where it is unset (docs/cluster.md): our values, or nothing.",
    )
    cost_per_gpu_hour: float | None = key(None, "Cost of one GPU for an hour, for estimates.", ge=0)

    @model_validator(mode="after")
    def _check_launch(self) -> Self:
        for name, value in self.environment.items():
            if not _VARIABLE.fullmatch(name):
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
                raise ValueError(f"launch.mounts: {mount!r} is not FOLDER:/PATH/IN/CONTAINER; correct it")
        return self


class Slurm(Section):
    partition: str | None = key(None, "Partition (--partition).")
    account: str | None = key(None, "Account (--account).")
    qos: str | None = key(None, "Quality of service (--qos).")
    reservation: str | None = key(None, "Reservation (--reservation).")
    constraint: str | None = key(None, "Features that nodes must have (--constraint).")
    switches: str | None = key(None, "Leaf switches at most, and how long to wait for them: 1@12:00:00 (--switches).")
    options: list[str] = key(
        [], "Any other options of sbatch, such as --mail-type=END. They take precedence over ours."
    )
    srun_options: list[str] = key([], "Any other options of srun.")

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
    accelerator: str = key("nvidia-h100-mega-80gb", "GKE's name of the GPU (cloud.google.com/gke-accelerator).")
    node_selector: dict[str, str] = key({}, "Other labels that nodes must have.")
    spot: bool = key(False, "Use spot nodes.")
    topology: str | None = key(
        None, "Label whose value all nodes must share, such as cloud.google.com/gke-nodepool; default none."
    )
    service_account: str | None = key(None, "Kubernetes service account, for access to buckets.")
    priority: str | None = key(None, "Priority class.")
    grace_seconds: int = key(300, "Time for a save after SIGTERM.", ge=10)
    shared_memory_gib: int = key(64, "Size of /dev/shm.", ge=1)
    host_network: bool = key(False, "Use the node's network, as GPUDirect needs on some machine types.")
    cpu: str | int | float | None = key(None, "CPU that a pod asks for, such as 100 or 500m; default none.")
    memory: str | int | float | None = key(None, "Memory that a pod asks for, such as 900Gi, or bytes; default none.")
    annotations: dict[str, str] = key({}, "Annotations of every pod, such as those that attach networks.")
    pod: dict[str, Any] = key({}, "Other fields of a pod's spec; lists are added to ours.")

    @model_validator(mode="after")
    def _check_quantities(self) -> Self:
        for name, example in (("cpu", "100 or 500m"), ("memory", "900Gi")):
            amount = getattr(self, name)
            fits = _QUANTITY.fullmatch(amount) if isinstance(amount, str) else amount is None or 0 < amount < math.inf
            if not fits:
                raise ValueError(f"gke.{name}: {amount!r} must be an amount such as {example}; correct it")
        return self
