"""Handing a JobSet to Kubernetes, so that all that belongs to it is its own and goes with it."""

import json
import secrets
import subprocess
from typing import Any

from jaxmnt.errors import ConfigError, UserError, remark
from jaxmnt.launch.manifest import Manifest, to_json

_RESOURCE = "jobsets.jobset.x-k8s.io"


def create(jobset: Manifest, belongings: list[Manifest], *, resume: bool) -> str:
    """Creates the JobSet, suspended, then what belongs to it, and lets it go if it is to `resume`. What kubectl says.

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
            go = ("--type=merge", "--patch", json.dumps({"spec": {"suspend": False}}))
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
        raise ConfigError("kubectl: there is no such command here; see --dry-run, or install it") from None
    if done.returncode != 0:
        raise UserError(f"kubectl refused {what}: {done.stderr.strip()}")
    return done.stdout.strip()
