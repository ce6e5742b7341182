"""A JobSet for GKE, or any Kubernetes with JobSet 0.12 or newer, and its submission.

The manifest's form: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/ and
https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy
"""

import hashlib
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import yaml

from jaxmnt.cluster.launchers import DEFAULT_PORT
from jaxmnt.config.load import dump_for_hosts
from jaxmnt.errors import ConfigError, ExitCode, UserError
from jaxmnt.launch.job import Job
from jaxmnt.launch.settings import checked, environment

_JOB, _CONTAINER = "workers", "train"
_IMAGES_USER = 1000
"""Of our Dockerfile: volumes are writable for this group."""
_CONFIG_FOLDER, _CONFIG_FILE = "/etc/jaxmnt", "run.yaml"
_DIGITS = 6
_LONGEST_NAME = 63 - len(f"-{_JOB}-0-") - len("99999") - len("-abcde")
"""Of a JobSet: its pods' names, with a number and a random end, have at most 63 letters."""

Manifest = dict[str, Any]


class _Text(str):
    """Shown as it is, line by line."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(_Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|"))


def render(wanted: Job) -> str:
    """The config as a ConfigMap, and the JobSet, as YAML. Raises `ConfigError` for what a cluster could not run."""
    return yaml.dump_all(manifests(wanted), Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=1000)


def manifests(wanted: Job) -> list[Manifest]:
    if wanted.sweep:
        raise ConfigError("--sweep: a sweep on Kubernetes is a JobSet for each run; launch them one by one")
    if wanted.config.launch.image is None:
        raise ConfigError("launch.image: missing; give the container image that has jaxmnt in it")
    if wanted.config.train.stop_after is not None:
        raise ConfigError("train.stop_after: a JobSet would start it again for ever; leave it out")
    _check_run_dir(wanted)
    name, text = _name(wanted), dump_for_hosts(wanted.config)
    metadata: Manifest = {"name": name, "namespace": wanted.config.gke.namespace}
    config_name = f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}"
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata | {"name": config_name},
        "immutable": True,
        "data": {_CONFIG_FILE: _Text(text)},
    }
    return [config, _jobset(wanted, name, config_name, metadata)]


def _check_run_dir(wanted: Job) -> None:
    """It has to outlive the pods. Raises `ConfigError`."""
    run_dir = Path(wanted.config.run.dir or "")
    folders = [mount.split(":", 1)[1] for mount in wanted.config.launch.mounts]
    if not wanted.config.gke.pod and not any(run_dir.is_relative_to(folder) for folder in folders):
        raise ConfigError(
            f"run.dir: {run_dir} is on no volume, and would be gone with its pod; choose one below a path of "
            "launch.mounts"
        )


def _name(wanted: Job) -> str:
    """From the run's directory, in the letters that Kubernetes allows. Directories of one name give different ones."""
    name = re.sub(r"[^a-z0-9]+", "-", wanted.run_dir.name.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"
    digest = hashlib.sha256(str(wanted.run_dir).encode()).hexdigest()[:_DIGITS]
    return f"{name[: _LONGEST_NAME - _DIGITS - 1].strip('-')}-{digest}"


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
            "replicatedJobs": [{"name": _JOB, "replicas": 1, "template": job(wanted, name, config_name)}],
        },
    }  # fmt: skip


def _rule(name: str, action: str, patterns: list[str]) -> Manifest:
    return {
        "name": name,
        "action": action,
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [f".*{pattern}.*" for pattern in patterns],
    }


def job(wanted: Job, name: str, config_name: str) -> Manifest:
    """The template of the Indexed Job: as many pods as nodes, all of which fail when one does."""
    nodes, pod = wanted.config.launch.nodes, _pod(wanted, name, config_name)
    stop: Manifest = {"action": "FailJob"}
    codes = [[int(ExitCode.CONFIG)], [int(ExitCode.STOPPED)]]
    rules = [
        stop | {"onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": values}} for values in codes
    ]
    rules.append(stop | {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]})
    return {
        "spec": {
            "parallelism": nodes,
            "completions": nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": rules},
            "template": {**_pod_metadata(wanted), "spec": _merged(pod, wanted.config.gke.pod)},
        }
    }


def _pod_metadata(wanted: Job) -> Manifest:
    annotations = wanted.config.gke.annotations
    return {"metadata": {"annotations": dict(sorted(annotations.items()))}} if annotations else {}


def _merged(ours: Any, more: Any) -> Any:
    """Mappings are merged, so are items of lists that have one name, and other items added; else `more` counts."""
    if isinstance(ours, dict) and isinstance(more, dict):
        return ours | {name: _merged(ours[name], value) if name in ours else value for name, value in more.items()}
    if isinstance(ours, list) and isinstance(more, list):
        named = {_called(item): item for item in more if _called(item)}
        known = {_called(item) for item in ours}
        joined = [_merged(item, named[_called(item)]) if _called(item) in named else item for item in ours]
        return joined + [item for item in more if not _called(item) or _called(item) not in known]
    return more


def _called(item: Any) -> str | None:
    """What tells an item of a list from the others; mounts of one volume may be several."""
    return item.get("mountPath", item.get("name")) if isinstance(item, dict) else None


def _pod(wanted: Job, name: str, config_name: str) -> Manifest:
    gke, launch = wanted.config.gke, wanted.config.launch
    selector, tolerations = dict(gke.node_selector), list[Manifest]()
    if launch.gpus_per_node:
        selector["cloud.google.com/gke-accelerator"] = gke.accelerator
        tolerations.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
    if gke.spot:
        selector["cloud.google.com/gke-spot"] = "true"
        tolerations.append(
            {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        )
    pod: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": gke.grace_seconds,
        "securityContext": {"fsGroup": _IMAGES_USER, "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [_container(wanted, name)],
        "volumes": _volumes(wanted, config_name),
    }
    optional: Manifest = {
        "nodeSelector": dict(sorted(selector.items())),
        "tolerations": tolerations,
        "serviceAccountName": gke.service_account,
        "priorityClassName": gke.priority,
    }
    if gke.host_network:
        optional |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return pod | {key: value for key, value in optional.items() if value}


def _container(wanted: Job, name: str) -> Manifest:
    gke, launch = wanted.config.gke, wanted.config.launch
    variables = environment(wanted.config) | {
        "JAX_NUM_PROCESSES": str(launch.nodes),
        "JAX_COORDINATOR_ADDRESS": f"{name}-{_JOB}-0-0.{name}:{DEFAULT_PORT}",
    }
    asked = {"nvidia.com/gpu": launch.gpus_per_node or None, "cpu": gke.cpu, "memory": gke.memory}
    resources = {what: str(amount) for what, amount in asked.items() if amount}
    command = [launch.python, "-m", "jaxmnt.train", "--config", f"{_CONFIG_FOLDER}/{_CONFIG_FILE}"]
    script = "\n".join([*checked(launch.setup), f"exec {shlex.join(command)}"])
    mounts = [mount.split(":", 1) for mount in launch.mounts]
    container: Manifest = {
        "name": _CONTAINER,
        "image": launch.image,
        "command": ["bash", "-c", _Text(script)],
        "env": [{"name": key, "value": value} for key, value in sorted(variables.items())],
        "ports": [{"containerPort": DEFAULT_PORT}],
        "volumeMounts": [
            {"name": "config", "mountPath": _CONFIG_FOLDER, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - NCCL's, not ours
            *({"name": f"data-{number}", "mountPath": path} for number, (_, path) in enumerate(mounts)),
        ],
    }
    return container | ({"resources": {"limits": resources}} if resources else {})


def _volumes(wanted: Job, config_name: str) -> list[Manifest]:
    memory = {"medium": "Memory", "sizeLimit": f"{wanted.config.gke.shared_memory_gib}Gi"}
    claims = [mount.split(":", 1)[0] for mount in wanted.config.launch.mounts]
    return [
        {"name": "config", "configMap": {"name": config_name}},
        {"name": "shared-memory", "emptyDir": memory},
        *(
            {"name": f"data-{number}", "persistentVolumeClaim": {"claimName": claim}}
            for number, claim in enumerate(claims)
        ),
    ]


def submit(wanted: Job) -> str:
    """Hands the manifests to kubectl; what that says. Raises `UserError` if it refuses."""
    said = []
    # What is there already is not changed: a JobSet that runs, or has run, is deleted by whoever wants another.
    for verb, manifest in zip(("apply", "create"), manifests(wanted), strict=True):
        text = yaml.dump(manifest, Dumper=_Dumper, sort_keys=False)
        try:
            done = subprocess.run(["kubectl", verb, "-f", "-"], input=text, capture_output=True, text=True)
        except FileNotFoundError:
            raise ConfigError("kubectl: there is no such command here; see --dry-run, or install it") from None
        if done.returncode != 0:
            raise UserError(f"kubectl refused the {manifest['kind']}: {done.stderr.strip()}")
        said.append(done.stdout.strip())
    return "\n".join(said)
