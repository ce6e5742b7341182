"""Manifests that every reader takes for the same, pods that obey their first SIGTERM, and objects that go together."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from conftest import until
from ruamel.yaml import YAML

from jaxmnt.config.load import dump_for_hosts, load_config
from jaxmnt.distributed.authentication import RUN_KEY
from jaxmnt.errors import ConfigError, UserError
from jaxmnt.launch import gke
from jaxmnt.launch.job import make_job

CLUSTER = ["launch.gpus_per_node=8", "data.global_batch_size=1024"]
ON_GKE = ["launch.image=i", "launch.mounts=['runs:/runs']", "run.dir=/runs/a", "data.path=/runs/words"]


@pytest.fixture
def asked(tiny_file):
    """A job on Kubernetes; arguments are settings."""
    return lambda *settings: make_job(tiny_file, [*CLUSTER, *ON_GKE, *settings], [])


def pod_of(jobset: dict) -> dict:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def container_of(jobset: dict) -> dict:
    return pod_of(jobset)["containers"][0]


# One text, several versions of YAML.


def yaml_1_1(text: str) -> list:
    return list(yaml.safe_load_all(text))


def yaml_1_2(text: str) -> list:
    return list(YAML(typ="safe", pure=True).load_all(text))


def yaml_1_1_to_the_letter(text: str) -> list:
    """With y and n for booleans, as in what kubectl reads."""
    reader = YAML(typ="safe", pure=True)
    reader.version = (1, 1)
    return list(reader.load_all(text))


READERS = [yaml_1_1, yaml_1_2, yaml_1_1_to_the_letter]
STRANGE = re.findall(
    r"\S+",
    """
    1e-4 y N 1e3 08 123e45 0o17 .5e1 yes no on Off null ~ 0x1F 1_000 12:30:45 2020-01-01 true .inf .nan - ? #x &a *a !x
    %x @x ' " \\ = << [1] {} | > 0b11 0 1. +1 -1 e1 0777 0o --- ... é 😀
    """,
)
STRANGE += ["", "a: b", "- a", "a #b", " a", "a ", "a\nb", "a\n\n b\n", " x\ny", "x\x85y", "x\u2028y\nz", "a\nb \n"]
STRANGE += ["x " * 900]


@pytest.mark.parametrize("reader", READERS)
def test_every_text_stays_one(reader):
    """As a value, as a name, and in a list; numbers and booleans stay what they are."""
    tree = {"names": {text: text for text in STRANGE}, "list": STRANGE, "yes": 1, "y": True, "number": 3, "ratio": 0.5}
    assert reader(gke.to_yaml(tree, {"more": None})) == [tree, {"more": None}]


@pytest.mark.parametrize("reader", READERS)
def test_manifests_read_the_same_everywhere(asked, reader):
    words = ["1e-4", "y", "N", "1e3", "08", "123e45", "0o17", ".5e1"]
    quoted = {f"V{number}": word for number, word in enumerate(words)}
    wanted = asked(
        f"launch.environment={json.dumps(quoted)}", "gke.node_selector={x: 'y', 'on': '1e3'}",
        "gke.cpu=100", "gke.memory=1e3",
        "gke.annotations={a: '08', 'n': 'no'}", "gke.priority='1e1'", "launch.image='1e5'", "gke.namespace=n",
        "gke.pod={schedulerName: '0x1', containers: [{name: train, env: [{name: Z, value: '1e2'}]}]}",
    )  # fmt: skip
    config, jobset = reader(gke.render(wanted))
    assert [config, jobset] == gke.manifests(wanted)
    pod, container = pod_of(jobset), container_of(jobset)
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert [variables[name] for name in quoted] == words and variables["Z"] == "1e2"
    assert pod["nodeSelector"]["x"] == "y" and pod["nodeSelector"]["on"] == "1e3"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "cpu": "100", "memory": "1000"}


def test_the_config_of_a_pod_keeps_texts_that_look_like_numbers(tiny_file, tmp_path):
    for text in ("1e3", "08", ".5e1", "+1e1", "123e45"):
        path = tmp_path / "run.yaml"
        path.write_text(dump_for_hosts(load_config(tiny_file, [f"run.dir='{text}'"])))
        assert load_config(path).run.dir == text


@pytest.mark.parametrize(
    ("given", "shown"),
    [("100", "100"), ("0.5", "0.5"), ("500m", "500m"), ("1e3", "1000"), ("'1e3'", "1e3"), ("4Gi", "4Gi"), ("2.", "2")],
)
def test_amounts_are_numbers_or_texts_as_in_kubernetes(asked, given, shown):
    jobset = gke.manifests(asked(f"gke.cpu={given}"))[1]
    assert container_of(jobset)["resources"]["limits"]["cpu"] == shown


@pytest.mark.parametrize("given", ["lots", "4GB", "-1", "0", "true", ".inf", "'1 Gi'", "4gi"])
def test_what_is_no_amount_is_refused(asked, given):
    with pytest.raises(ConfigError, match=r"gke\.memory"):
        asked(f"gke.memory={given}")


def expanded(text: str, variables: dict[str, str]) -> str:
    """What Kubernetes makes of a command or a value (k8s.io/kubernetes/third_party/forked/golang/expansion)."""
    found = lambda match: "$" if match[0] == "$$" else variables.get(match[1], match[0])
    return re.sub(r"\$\$|\$\(([^)]*)\)", found, text)


def test_dollars_reach_the_processes(asked):
    note = "$$ $(A) $HOME $$(A) $(date) ${A} $"
    jobset = gke.manifests(
        asked(f"launch.environment={json.dumps({'A': 'x', 'NOTE': note})}", "launch.setup=['echo $$ $(A)']")
    )[1]
    variables = {one["name"]: one.get("value") for one in container_of(jobset)["env"]}
    assert expanded(variables["NOTE"], variables) == note
    assert "eval 'echo $$ $(A)'" in expanded(container_of(jobset)["command"][2], variables)


def test_what_a_refusal_advises_reaches_the_pods(tiny_file, tmp_path):
    """A restart of the JobSet knows by its key that --fresh is done: without one it would begin anew each time."""
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho "$@"\n')
    python.chmod(0o755)
    flags = ["--accept-changes", "--fresh"]
    wanted = make_job(tiny_file, [*CLUSTER, *ON_GKE, f"launch.python={python}"], [], flags)
    container = container_of(gke.manifests(wanted)[1])
    (key,) = [one for one in container["env"] if one["name"] == RUN_KEY]
    assert "secretKeyRef" in key["valueFrom"], "one for all restarts"
    script = [expanded(word, {}) for word in container["command"]]
    start = lambda **more: subprocess.run(script, capture_output=True, text=True, timeout=30, env=os.environ | more)
    done = start(**{RUN_KEY: "ab"})
    assert done.stdout.split()[-2:] == flags, done.stderr
    refused = start()
    assert refused.returncode == 2 and "--fresh: JAXMNT_RUN_KEY is not set" in refused.stderr
    assert refused.stdout == ""


# What the pods can read, and what outlives them.


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["data.path=/data/words"], "data.path: /data/words is on no volume, and is not in the pods"),
        (["data.path=words"], "data.path: words is on no volume"),
        (
            ["run.dir=/x", "data.path=words"],
            "/x is on no volume, and would be lost with its pod; data.path: words is on",
        ),
        (["data.path=/runs/../data"], "data.path: /runs/../data is on no volume"),
        (["data.path=/runsofmine"], "data.path"),
        (["data.path=/etc/jaxmnt/x"], "data.path"),
        (["data.path=null", "data.sources={a: {path: /runs/a}, b: {path: /b}}"], r"data.sources.b.path: /b is on no"),
        (["run.dir=/dev/shm/run"], "run.dir: /dev/shm/run is on no volume, and would be lost with its pod"),
        (["checkpoint.dir=/tmp/x"], "checkpoint.dir: /tmp/x is on no volume, and would be lost with its pod"),
        (["run.dir=/x", "gke.pod={priority: 3}"], "run.dir: /x is on no volume"),
        (["gke.pod={containers: x}"], "gke.pod: containers must be a list of mappings"),
    ],
)
def test_folders_that_no_volume_holds(asked, settings, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        gke.manifests(asked(*settings))


def test_folders_that_a_volume_holds(asked):
    mounted = ("gke.pod={volumes: [{name: nfs, nfs: {server: s, path: /x}}], containers: [{name: train, "
               "volumeMounts: [{name: nfs, mountPath: /nfs}]}]}")  # fmt: skip
    gke.manifests(asked(mounted, "run.dir=/nfs/a", "data.path=/nfs/words", "checkpoint.dir=/nfs/c"))
    gke.manifests(asked("checkpoint.dir=gs://bucket/a"))
    gke.manifests(asked("data.path=null", "data.synthetic=100"))


def test_pods_wait_for_nodes_that_are_added_for_them(asked):
    def waits(*settings):
        return yaml.safe_load(gke.manifests(asked(*settings))[0]["data"]["run.yaml"])["cluster"][
            "start_timeout_seconds"
        ]

    assert waits() == 1800
    assert waits("cluster.start_timeout_seconds=600") == 600
    assert waits("launch.wait_minutes=90") == waits("launch.wait_minutes=90", "cluster.start_timeout_seconds=5") == 5400


# The first process of a container.

TRAIN = """#!{python}
import os, signal, sys, time
how, asked = os.environ["HOW"], []
def stop(number, frame):
    asked.append(number)
    if len(asked) > 1: os._exit(1)
if how != "deaf":
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, stop)
print("ready", flush=True)
if how.isdigit(): sys.exit(int(how))
while not asked or how == "twice": time.sleep(0.02)
print("saving", asked, flush=True)
time.sleep(0.5)
sys.exit(75)
"""


@pytest.fixture
def container(asked, tmp_path):
    """Runs a container's command as the first process of a process namespace."""
    probe = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("needs unshare, and the permission to make process namespaces")
    python = tmp_path / "python"
    python.write_text(TRAIN.format(python=sys.executable))
    python.chmod(0o755)
    started = []

    def start(how: str, *settings: str) -> subprocess.Popen:
        jobset = gke.manifests(asked(f"launch.python={python}", *settings))[1]
        command = [expanded(word, {}) for word in container_of(jobset)["command"]]
        process = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ, HOW=how),
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def first_of(process: subprocess.Popen) -> int:
    """The number of a container's first process as it is known outside."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until(lambda: children.read_text().split())
    (first,) = map(int, children.read_text().split())
    until(lambda: Path(f"/proc/{first}/cmdline").read_bytes().partition(b"\0")[0] not in (b"", b"unshare"))
    return first


def test_a_pod_obeys_before_python_listens(container):
    process = container("deaf")
    first = first_of(process)
    assert process.stdout.readline() == "ready\n"
    os.kill(first, signal.SIGTERM)
    assert process.wait(10) == 75, "nothing was lost: run me again"


def test_a_pod_obeys_from_its_first_moment(container):
    """Wherever the shell is: before it listens itself, a signal is lost only to a process that has done nothing."""
    for moment in (0.0, 0.001, 0.003, 0.01, 0.03, 0.1):
        process = container("listens")
        first = first_of(process)
        time.sleep(moment)
        status = Path(f"/proc/{first}/status").read_text()
        caught = int(re.search(r"SigCgt:\s*([0-9a-f]+)", status)[1], 16) >> (signal.SIGTERM - 1) & 1
        os.kill(first, signal.SIGTERM)
        if caught:
            assert process.wait(10) == 75
        process.kill()


def test_a_pod_that_is_setting_up_obeys(container):
    process = container("listens", "launch.setup=['echo ready', 'sleep 100']")
    first = first_of(process)
    assert process.stdout.readline() == "ready\n"
    os.kill(first, signal.SIGTERM)
    assert process.wait(10) == 75


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, 15), (signal.SIGINT, 15), (signal.SIGUSR1, 10)])
def test_a_pod_waits_for_the_save(container, number, name):
    process = container("listens")
    first = first_of(process)
    assert process.stdout.readline() == "ready\n"
    os.kill(first, number)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == 75 and out == f"saving [{name}]\n"


def test_the_script_of_a_pod_pleases_shellcheck(asked):
    if not shutil.which("shellcheck"):
        pytest.skip("needs shellcheck")
    script = container_of(gke.manifests(asked("launch.setup=['cd /x']"))[1])["command"][2]
    done = subprocess.run(
        ["shellcheck", "--shell=bash", "-"], input=expanded(script, {}), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_a_second_signal_reaches_the_process(container):
    process = container("twice")
    first = first_of(process)
    assert process.stdout.readline() == "ready\n"
    for _ in range(2):
        os.kill(first, signal.SIGTERM)
        time.sleep(0.3)
    assert process.wait(10) == 1


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 75, 143])
def test_a_pod_ends_with_the_code_of_its_process(container, code):
    process = container(str(code))
    assert process.wait(10) == code, "143 counts as asked for only if we were asked"


def test_a_pod_whose_setup_or_python_fails(container):
    assert container("0", "launch.setup=['false', 'true']").wait(10) == 1
    assert container("0", "launch.python=/no/such/python").wait(10) == 127
    process = container("0", "launch.setup=['export A=3', 'cd /', 'test $A = 3']")
    assert process.wait(10) == 0, "what it sets is there for the lines that follow"


# Submission.

KUBECTL = """#!{python}
import json, os, sys
folder, arguments = {folder!r}, sys.argv[1:]
text = "" if "-f" not in arguments else sys.stdin.read()
verb, kind = arguments[0], json.loads(text)["kind"] if text else ""
with open(folder + "/calls", "a") as file:
    file.write(json.dumps([arguments, json.loads(text) if text else None]) + "\\n")
if os.environ.get("REFUSE") in (kind, verb):
    print("Error from server (Forbidden): no \x1b[2J", file=sys.stderr)
    sys.exit(1)
print("1234-uid" if kind == "JobSet" else f"{{kind.lower()}}/x created", end="")
"""


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """A kubectl that notes what it is told, and refuses what REFUSE names."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "kubectl").write_text(KUBECTL.format(python=sys.executable, folder=str(folder)))
    (folder / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def calls():
        read = [json.loads(line) for line in (folder / "calls").read_text().splitlines()]
        (folder / "calls").unlink()
        return [(arguments[0], (given or {}).get("kind"), arguments, given) for arguments, given in read]

    return calls


def test_what_belongs_to_a_jobset_is_its_own(asked, kubectl):
    wanted = asked("gke.namespace=team")
    said = gke.submit(wanted)
    calls = kubectl()
    assert [call[:2] for call in calls] == [
        ("create", "JobSet"), ("create", "Secret"), ("create", "ConfigMap"), ("patch", None)
    ]  # fmt: skip
    jobset, secret, config = (call[3] for call in calls[:3])
    assert jobset["spec"]["suspend"] is True
    owner = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": jobset["metadata"]["name"],
             "uid": "1234-uid"}  # fmt: skip
    assert secret["metadata"]["ownerReferences"] == config["metadata"]["ownerReferences"] == [owner]
    assert {one["metadata"]["namespace"] for one in (jobset, secret, config)} == {"team"}
    assert calls[3][2] == ["patch", f"jobsets.jobset.x-k8s.io/{owner['name']}", "--namespace=team", "--type=merge",
                           "--patch", '{"spec": {"suspend": false}}']  # fmt: skip
    volume = next(one for one in pod_of(jobset)["volumes"] if one["name"] == "config")
    assert volume["configMap"]["name"] == config["metadata"]["name"]
    key = next(one for one in container_of(jobset)["env"] if one["name"] == "JAXMNT_RUN_KEY")["valueFrom"][
        "secretKeyRef"
    ]
    assert key["name"] == secret["metadata"]["name"] and re.fullmatch("[0-9a-f]{64}", secret["stringData"][key["key"]])
    assert f"{owner['name']} created" in said and secret["stringData"][key["key"]] not in said
    gke.submit(wanted)
    again = [call[3] for call in kubectl()[:3]]
    assert again[1]["stringData"] != secret["stringData"], "each has a key of its own"
    assert again[2]["metadata"]["name"] != config["metadata"]["name"], "and nothing that an older one takes with it"


def test_a_jobset_in_a_queue_is_let_go_by_kueue(asked, kubectl):
    gke.submit(asked("gke.queue=q"))
    assert [call[0] for call in kubectl()] == ["create", "create", "create"]


@pytest.mark.parametrize(
    ("refused", "words", "deleted"),
    [("JobSet", "the JobSet", False), ("Secret", "the Secret", True), ("ConfigMap", "the ConfigMap", True),
     ("patch", "to resume the JobSet", True)],
)  # fmt: skip
def test_what_is_refused_leaves_nothing(asked, kubectl, monkeypatch, refused, words, deleted):
    """Least of all when the JobSet is there already: that one is somebody's."""
    monkeypatch.setenv("REFUSE", refused)
    with pytest.raises(UserError, match=f"kubectl refused {words}: Error from server"):
        gke.submit(asked())
    calls = kubectl()
    assert [call[0] for call in calls].count("delete") == deleted
    if deleted:
        name = calls[0][3]["metadata"]["name"]
        assert calls[-1][2] == [
            "delete", f"jobsets.jobset.x-k8s.io/{name}", "--namespace=default", "--ignore-not-found"
        ]  # fmt: skip
    else:
        assert len(calls) == 1


def test_a_jobset_that_cannot_be_taken_back_is_named(asked, kubectl, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("REFUSE", "Secret")
    path = tmp_path / "bin" / "kubectl"
    path.write_text(path.read_text().replace("in (kind, verb)", 'in (kind, verb) or verb == "delete"'))
    with pytest.raises(UserError, match="the Secret"):
        gke.submit(asked())
    assert "still exists, suspended" in (said := capsys.readouterr().err)
    assert "kubectl delete jobsets.jobset.x-k8s.io/a-" in said


def test_a_dry_run_holds_no_key_and_says_how_to_make_one(asked):
    """It may be kept, and applied twice: kubectl apply -f - takes it as it is."""
    text = gke.render(asked())
    assert text == gke.render(asked()), "nothing random is in it"
    config, jobset = yaml.safe_load_all(text)
    assert config["kind"] == "ConfigMap" and jobset["kind"] == "JobSet" and "suspend" not in jobset["spec"]
    key = next(one for one in container_of(jobset)["env"] if one["name"] == "JAXMNT_RUN_KEY")["valueFrom"][
        "secretKeyRef"
    ]
    assert key["optional"] is True and not re.search("[0-9a-f]{64}", text)
    command = next(line for line in text.splitlines() if "create secret generic" in line)
    assert f"generic {key['name']} --from-literal={key['key']}=" in command and command.startswith("#")
