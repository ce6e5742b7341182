"""Writes a JobSet for GKE, or any Kubernetes with JobSet 0.12 or newer, and submits it.

Reference of the manifest: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/ and
https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy
"""

import hashlib
import os.path
import re
import secrets
import shlex
import subprocess
from pathlib import PurePosixPath
from typing import Any

import yaml

from jaxmnt.config.load import dump_for_hosts
from jaxmnt.distributed.authentication import RUN_KEY, RUN_KEY_BYTES
from jaxmnt.distributed.launchers import DEFAULT_PORT
from jaxmnt.errors import ConfigError, UserError, printable, remark
from jaxmnt.fleet.restart_policy import max_jobset_restarts
from jaxmnt.launch.job import Job, environment, exit_on_failure, fill_template, require_run_key, template
from jaxmnt.strict_json import json_text

Manifest = dict[str, Any]

_CONTAINER = "train"
_CONFIG_FOLDER, _CONFIG_FILE = "/etc/jaxmnt", "run.yaml"
_KEY_FIELD = "key"

_JOB = "workers"
_HASH_DIGITS = 6
_MAX_NAME_CHARACTERS = 63 - len(f"-{_JOB}-0-") - len("99999") - len("-abcde")
"""Maximum length of a JobSet's name, because its pods' names, with an index and a random suffix, may have 63
characters."""
_START_TIMEOUT_SECONDS = 1800.0
"""Default time to wait for all pods at a start, which is long because adding a node for a pod takes minutes."""
_EPHEMERAL_VOLUMES = ("emptyDir", "configMap", "secret", "downwardAPI", "projected", "ephemeral")
"""Kinds of volumes that are lost with their pod."""


def render(job: Job) -> str:
    """Returns YAML with the config, as a ConfigMap, and the JobSet. Raises `ConfigError` if no cluster could run the
    job.

    The YAML does not contain the run's key, since people save and share YAML. Without a key, the processes create one
    in `run.dir`.
    """
    config, jobset = manifests(job)
    return to_yaml(config, jobset) + _KEY_NOTE.format(
        namespace=config["metadata"]["namespace"], secret=_key_name(config["metadata"]["name"]), field=_KEY_FIELD,
        size=RUN_KEY_BYTES,
    )  # fmt: skip


_KEY_NOTE = """\
# The processes authenticate each other with a key. Without --dry-run it is created as a Secret that the JobSet owns.
# With this manifest, the processes create it in the file run.dir/run.key, unless the following Secret exists before the
# JobSet. Use another key for each run:
#   kubectl --namespace={namespace} create secret generic {secret} --from-literal={field}="$(openssl rand -hex {size})"
"""


def manifests(job: Job, salt: str = "") -> list[Manifest]:
    """Returns the ConfigMap and the JobSet. The names of objects that belong to the JobSet contain a hash of the config
    and `salt`."""
    if job.sweep:
        raise ConfigError("--sweep: not supported on Kubernetes, where each run is a JobSet; launch them one by one")
    if job.config.launch.image is None:
        raise ConfigError("launch.image: missing; give the container image that has jaxmnt in it")
    if job.config.train.stop_after is not None:
        raise ConfigError("train.stop_after: a JobSet would start it again for ever; leave it out")
    name, text = _jobset_name(job), _config_text(job)
    metadata: Manifest = {"name": name, "namespace": job.config.gke.namespace}
    config_name = f"{name}-{hashlib.sha256(f'{text}{salt}'.encode()).hexdigest()[:_HASH_DIGITS]}"
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata | {"name": config_name},
        "immutable": True,
        "data": {_CONFIG_FILE: text},
    }
    return [config, _jobset(job, name, config_name, metadata)]


def _config_text(job: Job) -> str:
    """Returns the config as YAML, with a start timeout that suits pods."""
    cluster = job.config.cluster.model_copy(
        update={"start_timeout_seconds": job.start_timeout_seconds(_START_TIMEOUT_SECONDS)}
    )
    return dump_for_hosts(job.config.model_copy(update={"cluster": cluster}))


def _check_folders(job: Job, pod: Manifest) -> None:
    """Raises `ConfigError` if a path that the run reads is not in the pod, or if one that it writes would be lost with
    the pod."""
    config = job.config
    ephemeral = {
        volume.get("name") for volume in _mappings(pod, "volumes") if any(kind in volume for kind in _EPHEMERAL_VOLUMES)
    }
    train = [container for container in _mappings(pod, "containers") if container.get("name") == _CONTAINER]
    mounts = [mount for mount in _mappings(train[0], "volumeMounts") if mount.get("mountPath") != _CONFIG_FOLDER]

    read = {f"data.sources.{name}.path": source.path for name, source in config.data.sources.items()}
    read |= {"data.path": config.data.path}
    written = {"run.dir": config.run.dir, "checkpoint.dir": config.checkpoint.dir}
    missing = []
    for key, path in (written | read).items():
        if path is None or "://" in path:
            continue
        on_volume = any(
            PurePosixPath(os.path.normpath(path)).is_relative_to(str(mount.get("mountPath")))
            for mount in mounts
            if key in read or mount.get("name") not in ephemeral
        )
        if not on_volume:
            end = "would be lost with its pod" if key in written else "is not in the pods"
            missing.append(f"{key}: {printable(path)} is on no volume, and {end}")
    if missing:
        choice = "a folder" if len(missing) == 1 else "folders"
        raise ConfigError(f"{'; '.join(missing)}; choose {choice} below a path of launch.mounts")


def _mappings(manifest: Manifest, field: str) -> list[Manifest]:
    """Returns a list of mappings from a manifest. Raises `ConfigError` if gke.pod has replaced that list
    with something else."""
    items = manifest[field]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ConfigError(f"gke.pod: {field} must be a list of mappings; correct it")
    return items


def _jobset_name(job: Job) -> str:
    """Returns the name of the JobSet, made from that of the run's directory, with only characters that Kubernetes
    allows. A hash of the path distinguishes directories with the same name."""
    name = re.sub(r"[^a-z0-9]+", "-", job.run_dir.name.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"
    digest = hashlib.sha256(str(job.run_dir).encode()).hexdigest()[:_HASH_DIGITS]
    return f"{name[: _MAX_NAME_CHARACTERS - _HASH_DIGITS - 1].strip('-')}-{digest}"


def _jobset(job: Job, name: str, config_name: str, metadata: Manifest) -> Manifest:
    gke, launch = job.config.gke, job.config.launch
    if gke.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": gke.queue}
    if gke.topology:
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": gke.topology}
    jobset: Manifest = yaml.safe_load(template("jobset.yaml"))
    jobset["metadata"], spec = metadata, jobset["spec"]
    spec["network"]["subdomain"] = name
    devices = launch.nodes * max(1, launch.gpus_per_node)
    spec["failurePolicy"]["maxRestarts"] = max_jobset_restarts(devices) if launch.restarts is None else launch.restarts
    workers = spec["replicatedJobs"][0]["template"]["spec"]
    workers["parallelism"] = workers["completions"] = launch.nodes
    coordinator = f"{name}-{_JOB}-0-0.{name}:{DEFAULT_PORT}"
    workers["template"] = _pod_template(job, coordinator, config_name, workers["template"]["spec"])
    return jobset


# -- pods, one for each host, with a shell as their first process


def _pod_template(job: Job, coordinator: str, config_name: str, pod: Manifest) -> Manifest:
    """Fills in the pod of the template, and adds the config's settings for it."""
    gke = job.config.gke
    pod["terminationGracePeriodSeconds"] = gke.grace_seconds
    [container], [config, memory] = pod["containers"], pod["volumes"]
    config["configMap"]["name"], memory["emptyDir"]["sizeLimit"] = config_name, f"{gke.shared_memory_gib}Gi"
    for number, mount in enumerate(job.config.launch.mounts):
        claim, path = mount.split(":", 1)
        pod["volumes"].append({"name": f"data-{number}", "persistentVolumeClaim": {"claimName": claim}})
        container["volumeMounts"].append({"name": f"data-{number}", "mountPath": path})
    _fill_container(container, job, coordinator, config_name)
    metadata = {"metadata": {"annotations": dict(sorted(gke.annotations.items()))}} if gke.annotations else {}
    spec = _merged(pod | _placement(job), gke.pod)
    _check_folders(job, spec)
    return metadata | {"spec": spec}


def _key_name(config_name: str) -> str:
    """Returns the name of the Secret with the run's key."""
    return f"{config_name}-key"


def _merged(ours: Any, override: Any) -> Any:
    """Merges an override into our part of a manifest, and returns the result.

    Mappings are merged recursively. In lists, items with the same key (see `_list_key`) are merged, and other items are
    appended. Anything else is replaced by `override`.
    """
    if isinstance(ours, dict) and isinstance(override, dict):
        return ours | {name: _merged(ours[name], value) if name in ours else value for name, value in override.items()}
    if isinstance(ours, list) and isinstance(override, list):
        by_key = {_list_key(item): item for item in override if _list_key(item)}
        our_keys = {_list_key(item) for item in ours}
        merged = [_merged(item, by_key[_list_key(item)]) if _list_key(item) in by_key else item for item in ours]
        return merged + [item for item in override if not _list_key(item) or _list_key(item) not in our_keys]
    return override


def _list_key(item: Any) -> str | None:
    """Returns the key of an item in a list: the path of a mount, since a volume may have several mounts, or else the
    name."""
    return item.get("mountPath", item.get("name")) if isinstance(item, dict) else None


def _placement(job: Job) -> Manifest:
    """Returns the fields of a pod that select its nodes, service account, priority and network."""
    gke = job.config.gke
    selector, tolerations = dict(gke.node_selector), list[Manifest]()
    if job.config.launch.gpus_per_node:
        selector["cloud.google.com/gke-accelerator"] = gke.accelerator
        tolerations.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
    if gke.spot:
        selector["cloud.google.com/gke-spot"] = "true"
        tolerations.append(
            {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        )
    fields: Manifest = {
        "nodeSelector": dict(sorted(selector.items())),
        "tolerations": tolerations,
        "serviceAccountName": gke.service_account,
        "priorityClassName": gke.priority,
    }
    if gke.host_network:
        fields |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return {name: value for name, value in fields.items() if value}


def _fill_container(container: Manifest, job: Job, coordinator: str, config_name: str) -> None:
    gke, launch = job.config.gke, job.config.launch
    variables = environment(job.config) | {
        "JAX_NUM_PROCESSES": str(launch.nodes),
        "JAX_COORDINATOR_ADDRESS": coordinator,
    }
    # Optional, because a user who applies the manifest by hand may not create the Secret.
    key = {"secretKeyRef": {"name": _key_name(config_name), "key": _KEY_FIELD, "optional": True}}
    container["image"], container["command"][2] = launch.image, _literal(_script(job))
    container["env"] = [{"name": name, "value": _literal(value)} for name, value in sorted(variables.items())]
    container["env"].append({"name": RUN_KEY, "valueFrom": key})
    container["ports"][0]["containerPort"] = DEFAULT_PORT
    limits = {"nvidia.com/gpu": launch.gpus_per_node or None, "cpu": gke.cpu, "memory": gke.memory}
    if set_limits := {resource: _format_amount(amount) for resource, amount in limits.items() if amount}:
        container["resources"] = {"limits": set_limits}


def _script(job: Job) -> str:
    """Returns the shell script that a pod runs."""
    launch = job.config.launch
    command = [launch.python, "-m", "jaxmnt.train", "--config", f"{_CONFIG_FOLDER}/{_CONFIG_FILE}", *job.flags]
    setup = "\n".join(f"    {line}" for line in [*exit_on_failure(launch.setup), *require_run_key(job.flags)] or [":"])
    return fill_template("pod.sh", setup=setup, command=shlex.join(command))


def _literal(text: str) -> str:
    """Escapes a text for Kubernetes, which expands $(NAME) in commands and values, and reads $$ as one $."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _format_amount(amount: float | str) -> str:
    """Formats an amount as Kubernetes does, so that 100.0 becomes 100."""
    return str(int(amount)) if isinstance(amount, float) and amount.is_integer() else str(amount)


_UNQUOTED_KEY = re.compile(r"[a-z][A-Za-z]{2,}")
"""Matches keys that are written without quotes."""


class _Dumper(yaml.SafeDumper):
    """Quotes all text except the names of fields, and writes text with several lines as a block."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        node: yaml.MappingNode = super().represent_mapping(tag, mapping, flow_style)
        for name, _ in node.value:
            if _UNQUOTED_KEY.fullmatch(name.value):
                name.style = None
        return node

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else '"')


_Dumper.add_representer(str, _represent_text)


def to_yaml(*manifests: Manifest) -> str:
    """Returns manifests as YAML that people can read and that `kubectl apply -f -` accepts."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=float("inf"))


# -- submission


def submit(job: Job) -> str:
    """Submits the manifests with kubectl. Returns its output. Raises `UserError` if kubectl rejects them.

    Existing objects are not changed: a user who wants to launch again deletes the earlier JobSet.
    """
    # Kubernetes may still be deleting the dependents of a deleted JobSet by name, so new ones need new names.
    config, jobset = manifests(job, salt=secrets.token_hex())
    # With a queue, Kueue resumes the JobSet.
    return create(jobset, [_run_key_secret(config["metadata"]), config], resume=not job.config.gke.queue)


_RESOURCE = "jobsets.jobset.x-k8s.io"


def create(jobset: Manifest, dependents: list[Manifest], *, resume: bool) -> str:
    """Creates the JobSet, suspended, then its dependents, and resumes it if `resume` is set. Returns kubectl's output.

    If kubectl rejects anything, deletes all objects again and raises `UserError`.
    """
    metadata = jobset["metadata"]
    suspended = jobset | {"spec": jobset["spec"] | {"suspend": True}}
    uid = _kubectl("the JobSet", "create", "-f", "-", "-o", "jsonpath={.metadata.uid}", text=json_text(suspended))
    try:
        owner = {name: jobset[name] for name in ("apiVersion", "kind")} | {"name": metadata["name"], "uid": uid}
        output = [f"{_RESOURCE}/{metadata['name']} created"]
        for dependent in dependents:
            owned = dependent | {"metadata": dependent["metadata"] | {"ownerReferences": [owner]}}
            output.append(_kubectl(f"the {dependent['kind']}", "create", "-f", "-", text=json_text(owned)))
        if resume:
            patch = ("--type=merge", "--patch", json_text({"spec": {"suspend": False}}))
            _kubectl("to resume the JobSet", "patch", *_object_arguments(metadata), *patch)
    except BaseException:
        _delete_jobset(metadata)
        raise
    return "\n".join(output)


def _run_key_secret(metadata: Manifest) -> Manifest:
    """Returns a Secret with a new random key. `metadata` is that of the JobSet's ConfigMap."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata | {"name": _key_name(metadata["name"])},
        "immutable": True,
        "stringData": {_KEY_FIELD: secrets.token_hex(RUN_KEY_BYTES)},
    }


def _delete_jobset(metadata: Manifest) -> None:
    """Deletes the JobSet and its dependents. Shows a note if that fails."""
    try:
        _kubectl("to delete the JobSet", "delete", *_object_arguments(metadata), "--ignore-not-found")
    except UserError as error:
        remark(
            f"note: the JobSet {metadata['name']} in the namespace {metadata['namespace']} still exists, suspended "
            f"({error}); delete it with: kubectl delete {' '.join(_object_arguments(metadata))}"
        )


def _object_arguments(metadata: Manifest) -> list[str]:
    """Returns the arguments with which kubectl is told the name of a JobSet."""
    return [f"{_RESOURCE}/{metadata['name']}", f"--namespace={metadata['namespace']}"]


def _kubectl(request: str, *arguments: str, text: str = "") -> str:
    """Runs kubectl with `text` as its input, and returns its output. Raises `UserError`, which names the `request`, if
    kubectl refuses it."""
    try:
        completed = subprocess.run(["kubectl", *arguments], input=text, capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError("kubectl: this command is not installed here; see --dry-run, or install it") from None
    if completed.returncode != 0:
        raise UserError(f"kubectl refused {request}: {completed.stderr.strip()}")
    return completed.stdout.strip()
