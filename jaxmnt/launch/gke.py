"""A JobSet for GKE, or any Kubernetes with JobSet 0.12 or newer, and its submission.

The manifest's form: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/ and
https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy
"""

import hashlib
import os.path
import re
import secrets
import subprocess
from pathlib import PurePosixPath
from typing import Any

from jaxmnt.config.load import dump_for_hosts
from jaxmnt.distributed.authentication import RUN_KEY_BYTES
from jaxmnt.distributed.launchers import DEFAULT_PORT
from jaxmnt.errors import ConfigError, ExitCode, UserError, printable, remark
from jaxmnt.launch.job import Job
from jaxmnt.launch.pod import (
    CONFIG_FILE,
    CONFIG_FOLDER,
    CONTAINER,
    KEY_FIELD,
    Manifest,
    key_name,
    pod,
    to_json,
    to_yaml,
)

_JOB = "workers"
_DIGITS = 6
_LONGEST_NAME = 63 - len(f"-{_JOB}-0-") - len("99999") - len("-abcde")
"""Of a JobSet: its pods' names, with a number and a random end, have at most 63 letters."""
_WAIT_SECONDS = 1800.0
"""For all pods at a start: a node that is added for one takes minutes."""
_GONE_WITH_THE_POD = ("emptyDir", "configMap", "secret", "downwardAPI", "projected", "ephemeral")
"""Kinds of volumes."""


def render(wanted: Job) -> str:
    """The config as a ConfigMap, and the JobSet, as YAML. Raises `ConfigError` for what a cluster could not run.

    The run's key is not in it, since it is kept and shown: without one the processes make their own in `run.dir`.
    """
    config, jobset = manifests(wanted)
    return to_yaml(config, jobset) + _KEY_NOTE.format(
        namespace=config["metadata"]["namespace"], secret=key_name(config["metadata"]["name"]), field=KEY_FIELD,
        size=RUN_KEY_BYTES,
    )  # fmt: skip


_KEY_NOTE = """\
# The processes know each other by a key. Without --dry-run it is made, as a Secret that the JobSet owns. Here they make
# a file of it, run.dir/run.key, unless there is such a Secret before the JobSet, with another key for each run:
#   kubectl --namespace={namespace} create secret generic {secret} --from-literal={field}="$(openssl rand -hex {size})"
"""


def manifests(wanted: Job, salt: str = "") -> list[Manifest]:
    """ConfigMap and JobSet. What belongs to the JobSet has a name that follows from the config and `salt`."""
    if wanted.sweep:
        raise ConfigError("--sweep: a sweep on Kubernetes is a JobSet for each run; launch them one by one")
    if wanted.config.launch.image is None:
        raise ConfigError("launch.image: missing; give the container image that has jaxmnt in it")
    if wanted.config.train.stop_after is not None:
        raise ConfigError("train.stop_after: a JobSet would start it again for ever; leave it out")
    name, text = _name(wanted), _config_text(wanted)
    metadata: Manifest = {"name": name, "namespace": wanted.config.gke.namespace}
    config_name = f"{name}-{hashlib.sha256(f'{text}{salt}'.encode()).hexdigest()[:_DIGITS]}"
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata | {"name": config_name},
        "immutable": True,
        "data": {CONFIG_FILE: text},
    }
    jobset = _jobset(wanted, name, config_name, metadata)
    _check_folders(wanted, jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"])
    return [config, jobset]


def _config_text(wanted: Job) -> str:
    """The config, in which processes wait for each other as pods have to."""
    cluster = wanted.config.cluster.model_copy(
        update={"start_timeout_seconds": wanted.start_timeout_seconds(_WAIT_SECONDS)}
    )
    return dump_for_hosts(wanted.config.model_copy(update={"cluster": cluster}))


def _check_folders(wanted: Job, pod: Manifest) -> None:
    """What a run reads has to be in the pod, and what it writes has to outlive it. Raises `ConfigError`."""
    config = wanted.config
    gone = {one.get("name") for one in _items(pod, "volumes") if any(kind in one for kind in _GONE_WITH_THE_POD)}
    train = [one for one in _items(pod, "containers") if one.get("name") == CONTAINER]
    mounts = [one for one in _items(train[0], "volumeMounts") if one.get("mountPath") != CONFIG_FOLDER]
    read = {f"data.sources.{name}.path": source.path for name, source in config.data.sources.items()}
    read |= {"data.path": config.data.path}
    written = {"run.dir": config.run.dir, "checkpoint.dir": config.checkpoint.dir}
    for key, path in (written | read).items():
        if path is None or "://" in path:
            continue
        held = any(
            PurePosixPath(os.path.normpath(path)).is_relative_to(str(mount.get("mountPath")))
            for mount in mounts
            if key in read or mount.get("name") not in gone
        )
        if not held:
            end = "would be gone with its pod" if key in written else "is not in the pods"
            raise ConfigError(
                f"{key}: {printable(path)} is on no volume, and {end}; choose one below a path of launch.mounts"
            )


def _items(of: Manifest, field: str) -> list[Manifest]:
    """Raises `ConfigError` where gke.pod has made something else of them."""
    found = of[field]
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ConfigError(f"gke.pod: {field} must be a list of mappings; correct it")
    return found


def _name(wanted: Job) -> str:
    """From the run's directory, in the letters that Kubernetes allows. Directories of one name give different ones."""
    name = re.sub(r"[^a-z0-9]+", "-", wanted.run_dir.name.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"
    digest = hashlib.sha256(str(wanted.run_dir).encode()).hexdigest()[:_DIGITS]
    return f"{name[: _LONGEST_NAME - _DIGITS - 1].strip('-')}-{digest}"


def _address(name: str) -> str:
    """Of process 0."""
    return f"{name}-{_JOB}-0-0.{name}:{DEFAULT_PORT}"


def _jobset(wanted: Job, name: str, config_name: str, metadata: Manifest) -> Manifest:
    gke, launch = wanted.config.gke, wanted.config.launch
    if gke.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": gke.queue}
    if gke.topology:
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": gke.topology}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "successPolicy": {"operator": "All"},
            "failurePolicy": {
                "maxRestarts": launch.restarts,
                "rules": [
                    _rule("wrongConfig", "FailJobSet", [f"exit code {int(ExitCode.CONFIG)} matching"]),
                    _rule(
                        "runAgain", "RestartJobSetAndIgnoreMaxRestarts",
                        [f"exit code {int(ExitCode.STOPPED)} matching", "condition DisruptionTarget matching"],
                    ),
                ],
            },
            "replicatedJobs": [{"name": _JOB, "replicas": 1, "template": _job(wanted, name, config_name)}],
        },
    }  # fmt: skip


def _rule(name: str, action: str, patterns: list[str]) -> Manifest:
    return {
        "name": name,
        "action": action,
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [f".*{pattern}.*" for pattern in patterns],
    }


def _job(wanted: Job, name: str, config_name: str) -> Manifest:
    """The template of the Indexed Job: as many pods as nodes, all of which fail when one does."""
    nodes = wanted.config.launch.nodes
    stop: Manifest = {"action": "FailJob"}
    codes = [[int(ExitCode.CONFIG)], [int(ExitCode.STOPPED)]]
    rules = [
        stop | {"onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": values}} for values in codes
    ]
    rules.append(stop | {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]})
    return {
        "spec": {
            "parallelism": nodes,
            "completions": nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": rules},
            "template": pod(wanted, _address(name), config_name),
        }
    }


def submit(wanted: Job) -> str:
    """Hands the manifests to kubectl; what that says. Raises `UserError` if it refuses.

    What is there already is not changed: a JobSet that runs, or has run, is deleted by whoever wants another.
    """
    # Of a JobSet that was just deleted, Kubernetes may still be about to delete what belonged to it, by name.
    config, jobset = manifests(wanted, salt=secrets.token_hex())
    metadata = config["metadata"]
    key = run_key_secret(metadata, key_name(metadata["name"]), KEY_FIELD, RUN_KEY_BYTES)
    # Kueue lets go what waits in its queues.
    return create(jobset, [key, config], resume=not wanted.config.gke.queue)


_RESOURCE = "jobsets.jobset.x-k8s.io"


def create(jobset: Manifest, belongings: list[Manifest], *, resume: bool) -> str:
    """Creates the JobSet, suspended, then what belongs to it, and unsuspends it with `resume`. What kubectl says.

    Raises `UserError` if something is refused; then nothing of it is left.
    """
    metadata = jobset["metadata"]
    suspended = jobset | {"spec": jobset["spec"] | {"suspend": True}}
    uid = _kubectl("the JobSet", "create", "-f", "-", "-o", "jsonpath={.metadata.uid}", text=to_json(suspended))
    try:
        owner = {name: jobset[name] for name in ("apiVersion", "kind")} | {"name": metadata["name"], "uid": uid}
        said = [f"{_RESOURCE}/{metadata['name']} created"]
        for one in belongings:
            owned = one | {"metadata": one["metadata"] | {"ownerReferences": [owner]}}
            said.append(_kubectl(f"the {one['kind']}", "create", "-f", "-", text=to_json(owned)))
        if resume:
            go = ("--type=merge", "--patch", to_json({"spec": {"suspend": False}}))
            _kubectl("to resume the JobSet", "patch", *_named(metadata), *go)
    except BaseException:
        _take_back(metadata)
        raise
    return "\n".join(said)


def run_key_secret(metadata: Manifest, name: str, field: str, size: int) -> Manifest:
    """A Secret with a key that nobody has seen."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata | {"name": name},
        "immutable": True,
        "stringData": {field: secrets.token_hex(size)},
    }


def _take_back(metadata: Manifest) -> None:
    """Deletes the JobSet, and by that what belongs to it."""
    try:
        _kubectl("to delete the JobSet", "delete", *_named(metadata), "--ignore-not-found")
    except UserError as error:
        remark(
            f"note: the JobSet {metadata['name']} in the namespace {metadata['namespace']} is left, suspended "
            f"({error}); delete it: kubectl delete {' '.join(_named(metadata))}"
        )


def _named(metadata: dict[str, Any]) -> list[str]:
    return [f"{_RESOURCE}/{metadata['name']}", f"--namespace={metadata['namespace']}"]


def _kubectl(what: str, *arguments: str, text: str = "") -> str:
    try:
        done = subprocess.run(["kubectl", *arguments], input=text, capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError("kubectl: this command is not installed here; see --dry-run, or install it") from None
    if done.returncode != 0:
        raise UserError(f"kubectl refused {what}: {done.stderr.strip()}")
    return done.stdout.strip()
