"""A JobSet for GKE, or any Kubernetes with JobSet 0.12 or newer, and its submission.

The manifest's form: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/ and
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
from jaxmnt.launch.job import Job, ending_on_failure, environment, filled, key_needed, template
from jaxmnt.strict_json import json_text

Manifest = dict[str, Any]

_CONTAINER = "train"
_CONFIG_FOLDER, _CONFIG_FILE = "/etc/jaxmnt", "run.yaml"
_KEY_FIELD = "key"

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
        namespace=config["metadata"]["namespace"], secret=_key_name(config["metadata"]["name"]), field=_KEY_FIELD,
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
        "data": {_CONFIG_FILE: text},
    }
    return [config, _jobset(wanted, name, config_name, metadata)]


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
    train = [one for one in _items(pod, "containers") if one.get("name") == _CONTAINER]
    mounts = [one for one in _items(train[0], "volumeMounts") if one.get("mountPath") != _CONFIG_FOLDER]
    read = {f"data.sources.{name}.path": source.path for name, source in config.data.sources.items()}
    read |= {"data.path": config.data.path}
    written = {"run.dir": config.run.dir, "checkpoint.dir": config.checkpoint.dir}
    missing = []
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
            missing.append(f"{key}: {printable(path)} is on no volume, and {end}")
    if missing:
        choice = "a folder" if len(missing) == 1 else "folders"
        raise ConfigError(f"{'; '.join(missing)}; choose {choice} below a path of launch.mounts")


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


def _jobset(wanted: Job, name: str, config_name: str, metadata: Manifest) -> Manifest:
    gke, launch = wanted.config.gke, wanted.config.launch
    if gke.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": gke.queue}
    if gke.topology:
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": gke.topology}
    jobset: Manifest = yaml.safe_load(template("jobset.yaml"))
    jobset["metadata"], spec = metadata, jobset["spec"]
    spec["network"]["subdomain"] = name
    spec["failurePolicy"]["maxRestarts"] = launch.restarts
    workers = spec["replicatedJobs"][0]["template"]["spec"]
    workers["parallelism"] = workers["completions"] = launch.nodes
    coordinator = f"{name}-{_JOB}-0-0.{name}:{DEFAULT_PORT}"
    workers["template"] = _pod_template(wanted, coordinator, config_name, workers["template"]["spec"])
    return jobset


# -- the pods: one for each host, with a shell as their first process


def _pod_template(wanted: Job, coordinator: str, config_name: str, pod: Manifest) -> Manifest:
    """Fills in the pod of the template, and adds what else the config says of it."""
    gke = wanted.config.gke
    pod["terminationGracePeriodSeconds"] = gke.grace_seconds
    [container], [config, memory] = pod["containers"], pod["volumes"]
    config["configMap"]["name"], memory["emptyDir"]["sizeLimit"] = config_name, f"{gke.shared_memory_gib}Gi"
    for number, mount in enumerate(wanted.config.launch.mounts):
        claim, path = mount.split(":", 1)
        pod["volumes"].append({"name": f"data-{number}", "persistentVolumeClaim": {"claimName": claim}})
        container["volumeMounts"].append({"name": f"data-{number}", "mountPath": path})
    _fill_in(container, wanted, coordinator, config_name)
    metadata = {"metadata": {"annotations": dict(sorted(gke.annotations.items()))}} if gke.annotations else {}
    spec = _merged(pod | _placement(wanted), gke.pod)
    _check_folders(wanted, spec)
    return metadata | {"spec": spec}


def _key_name(config_name: str) -> str:
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


def _placement(wanted: Job) -> Manifest:
    """Returns the fields of a pod that say on which nodes it is, and as whom."""
    gke = wanted.config.gke
    selector, tolerations = dict(gke.node_selector), list[Manifest]()
    if wanted.config.launch.gpus_per_node:
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


def _fill_in(container: Manifest, wanted: Job, coordinator: str, config_name: str) -> None:
    gke, launch = wanted.config.gke, wanted.config.launch
    variables = environment(wanted.config) | {
        "JAX_NUM_PROCESSES": str(launch.nodes),
        "JAX_COORDINATOR_ADDRESS": coordinator,
    }
    # Optional: who applies a manifest by hand need not make the Secret.
    key = {"secretKeyRef": {"name": _key_name(config_name), "key": _KEY_FIELD, "optional": True}}
    container["image"], container["command"][2] = launch.image, _literal(_script(wanted))
    container["env"] = [{"name": name, "value": _literal(value)} for name, value in sorted(variables.items())]
    container["env"].append({"name": RUN_KEY, "valueFrom": key})
    container["ports"][0]["containerPort"] = DEFAULT_PORT
    asked = {"nvidia.com/gpu": launch.gpus_per_node or None, "cpu": gke.cpu, "memory": gke.memory}
    if resources := {what: _amount(amount) for what, amount in asked.items() if amount}:
        container["resources"] = {"limits": resources}


def _script(wanted: Job) -> str:
    launch = wanted.config.launch
    command = [launch.python, "-m", "jaxmnt.train", "--config", f"{_CONFIG_FOLDER}/{_CONFIG_FILE}", *wanted.flags]
    setup = "\n".join(f"    {line}" for line in [*ending_on_failure(launch.setup), *key_needed(wanted.flags)] or [":"])
    return filled("pod.sh", setup=setup, command=shlex.join(command))


def _literal(text: str) -> str:
    """Kubernetes puts variables into commands and values, $(NAME), and takes $$ for one $."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _amount(amount: float | str) -> str:
    """As Kubernetes writes it: 100 and 100.0 are the same."""
    return str(int(amount)) if isinstance(amount, float) and amount.is_integer() else str(amount)


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


# -- submission


def submit(wanted: Job) -> str:
    """Hands the manifests to kubectl; what that says. Raises `UserError` if it refuses.

    What is there already is not changed: a JobSet that runs, or has run, is deleted by whoever wants another.
    """
    # Of a JobSet that was just deleted, Kubernetes may still be about to delete what belonged to it, by name.
    config, jobset = manifests(wanted, salt=secrets.token_hex())
    # Kueue lets go what waits in its queues.
    return create(jobset, [_run_key_secret(config["metadata"]), config], resume=not wanted.config.gke.queue)


_RESOURCE = "jobsets.jobset.x-k8s.io"


def create(jobset: Manifest, belongings: list[Manifest], *, resume: bool) -> str:
    """Creates the JobSet, suspended, then what belongs to it, and unsuspends it with `resume`. What kubectl says.

    Raises `UserError` if something is refused; then nothing of it is left.
    """
    metadata = jobset["metadata"]
    suspended = jobset | {"spec": jobset["spec"] | {"suspend": True}}
    uid = _kubectl("the JobSet", "create", "-f", "-", "-o", "jsonpath={.metadata.uid}", text=json_text(suspended))
    try:
        owner = {name: jobset[name] for name in ("apiVersion", "kind")} | {"name": metadata["name"], "uid": uid}
        said = [f"{_RESOURCE}/{metadata['name']} created"]
        for one in belongings:
            owned = one | {"metadata": one["metadata"] | {"ownerReferences": [owner]}}
            said.append(_kubectl(f"the {one['kind']}", "create", "-f", "-", text=json_text(owned)))
        if resume:
            go = ("--type=merge", "--patch", json_text({"spec": {"suspend": False}}))
            _kubectl("to resume the JobSet", "patch", *_named(metadata), *go)
    except BaseException:
        _take_back(metadata)
        raise
    return "\n".join(said)


def _run_key_secret(metadata: Manifest) -> Manifest:
    """A Secret with a key that nobody has seen, for the JobSet of a ConfigMap with this metadata."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata | {"name": _key_name(metadata["name"])},
        "immutable": True,
        "stringData": {_KEY_FIELD: secrets.token_hex(RUN_KEY_BYTES)},
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


def _named(metadata: Manifest) -> list[str]:
    return [f"{_RESOURCE}/{metadata['name']}", f"--namespace={metadata['namespace']}"]


def _kubectl(what: str, *arguments: str, text: str = "") -> str:
    try:
        done = subprocess.run(["kubectl", *arguments], input=text, capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError("kubectl: this command is not installed here; see --dry-run, or install it") from None
    if done.returncode != 0:
        raise UserError(f"kubectl refused {what}: {done.stderr.strip()}")
    return done.stdout.strip()
