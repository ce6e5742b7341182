"""The pods of a JobSet: one for each host, with a shell as their first process."""

import re
import shlex
from importlib.resources import files
from typing import Any

import yaml

from jaxmnt.distributed.authentication import RUN_KEY
from jaxmnt.distributed.launchers import DEFAULT_PORT
from jaxmnt.launch.job import Job, ending_on_failure, environment, filled, key_needed
from jaxmnt.strict_json import json_text

Manifest = dict[str, Any]

CONTAINER = "train"
CONFIG_FOLDER, CONFIG_FILE = "/etc/jaxmnt", "run.yaml"
KEY_FIELD = "key"
_IMAGES_USER = 1000
"""Of our Dockerfile: volumes are writable for this group."""


def pod(wanted: Job, coordinator: str, config_name: str) -> Manifest:
    """The template, with what the config adds to it."""
    annotations = wanted.config.gke.annotations
    metadata = {"metadata": {"annotations": dict(sorted(annotations.items()))}} if annotations else {}
    return metadata | {"spec": _merged(_pod(wanted, coordinator, config_name), wanted.config.gke.pod)}


def key_name(config_name: str) -> str:
    """Of the Secret with the run's key."""
    return f"{config_name}-key"


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


def _pod(wanted: Job, coordinator: str, config_name: str) -> Manifest:
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
        "containers": [_container(wanted, coordinator, config_name)],
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


def _container(wanted: Job, coordinator: str, config_name: str) -> Manifest:
    gke, launch = wanted.config.gke, wanted.config.launch
    variables = environment(wanted.config) | {
        "JAX_NUM_PROCESSES": str(launch.nodes),
        "JAX_COORDINATOR_ADDRESS": coordinator,
    }
    # Optional: who applies a manifest by hand need not make the Secret.
    key = {"secretKeyRef": {"name": key_name(config_name), "key": KEY_FIELD, "optional": True}}
    asked = {"nvidia.com/gpu": launch.gpus_per_node or None, "cpu": gke.cpu, "memory": gke.memory}
    resources = {what: _amount(amount) for what, amount in asked.items() if amount}
    mounts = [mount.split(":", 1) for mount in launch.mounts]
    container: Manifest = {
        "name": CONTAINER,
        "image": launch.image,
        "command": ["bash", "-c", _literal(_script(wanted))],
        "env": [
            *({"name": variable, "value": _literal(value)} for variable, value in sorted(variables.items())),
            {"name": RUN_KEY, "valueFrom": key},
        ],
        "ports": [{"containerPort": DEFAULT_PORT}],
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - NCCL's, not ours
            *({"name": f"data-{number}", "mountPath": path} for number, (_, path) in enumerate(mounts)),
        ],
    }
    return container | ({"resources": {"limits": resources}} if resources else {})


def _script(wanted: Job) -> str:
    launch = wanted.config.launch
    template = files("jaxmnt.launch").joinpath("templates/pod.sh").read_text(encoding="utf-8")
    command = [launch.python, "-m", "jaxmnt.train", "--config", f"{CONFIG_FOLDER}/{CONFIG_FILE}", *wanted.flags]
    setup = "\n".join(f"    {line}" for line in [*ending_on_failure(launch.setup), *key_needed(wanted.flags)] or [":"])
    return filled(template, setup=setup, command=shlex.join(command))


def _literal(text: str) -> str:
    """Kubernetes puts variables into commands and values, $(NAME), and takes $$ for one $."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _amount(amount: float | str) -> str:
    """As Kubernetes writes it: 100 and 100.0 are the same."""
    return str(int(amount)) if isinstance(amount, float) and amount.is_integer() else str(amount)


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


_FIELD = re.compile(r"[a-z][A-Za-z]{2,}")
"""Names that are left plain, unless they are a word of YAML."""


class _Dumper(yaml.SafeDumper):
    """Puts all text into quotes, but for names of fields; text of several lines is shown line by line."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        node: yaml.MappingNode = super().represent_mapping(tag, mapping, flow_style)
        for name, _ in node.value:
            if _FIELD.fullmatch(name.value):
                name.style = None
        return node

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else '"')


_Dumper.add_representer(str, _text)


def to_yaml(*manifests: Manifest) -> str:
    """For people, and for `kubectl apply -f -`."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=float("inf"))


def to_json(manifest: Manifest) -> str:
    """For kubectl."""
    return json_text(manifest)
