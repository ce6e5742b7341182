"""Job scripts and manifests: what they ask for, and what is decided inside an allocation."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from conftest import command

from jaxmnt.checkpoint.refs import RunFile
from jaxmnt.config.load import load_config
from jaxmnt.distributed.authentication import RUN_KEY
from jaxmnt.errors import ConfigError
from jaxmnt.launch import gke, slurm
from jaxmnt.launch.__main__ import main
from jaxmnt.launch.inside import Ledger
from jaxmnt.launch.inside import decide_after_start as after
from jaxmnt.launch.inside import decide_before_start as before
from jaxmnt.launch.job import cost, make_job
from jaxmnt.run import fresh
from jaxmnt.telemetry.events import Events

CLUSTER = ["launch.gpus_per_node=8", "data.global_batch_size=1024"]
ON_GKE = ["launch.image=registry.example/jaxmnt:1", "launch.mounts=['runs:/runs']", "run.dir=/runs/a",
          "data.path=/runs/words"]  # fmt: skip


@pytest.fixture
def asked(tiny_file):
    """A job of the tiny config; arguments are settings."""
    return lambda *settings, sweep=(): make_job(tiny_file, [*CLUSTER, *settings], list(sweep))


def options_of(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.parametrize("nodes", [1, 4, 16, 64])
def test_scripts_are_sound(asked, tmp_path, nodes):
    settings = ["launch.spare_nodes=1", "launch.hours=24", 'launch.setup=["module load cuda", "cd $HOME"]',
                "slurm.switches=1@12:00:00", "slurm.account=team",
                "launch.environment={NOTE: \"it's a 'test' of $HOME\"}", "launch.image=/shared/image.sqsh",
                f"launch.mounts=['{tmp_path}:{tmp_path}']"]  # fmt: skip
    script = slurm.render(asked(f"launch.nodes={nodes}", *settings, sweep=["seed=1,2", "optimizer.beta2=0.9"]))
    path = tmp_path / "job.sh"
    path.write_text(script)
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    options = options_of(script)
    assert f"--container-mounts={tmp_path}:{tmp_path}" in script
    assert {f"--nodes={nodes + 1}", "--requeue", "--no-kill", "--time=1440", "--array=0-1", "--account=team",
            "--switches=1@12:00:00", "--gpus-per-node=8", "--signal=USR1@300"} <= set(options)  # fmt: skip
    assert not re.search(r"@[a-z_]+@", script), "a slot was not filled"


@pytest.mark.parametrize("nodes", [1, 64])
def test_scripts_please_shellcheck(asked, tmp_path, nodes):
    if not shutil.which("shellcheck"):
        pytest.skip("needs shellcheck")
    for number, sweep in enumerate(((), ("seed=1,2",))):
        path = tmp_path / f"{number}.sh"
        path.write_text(slurm.render(asked(f"launch.nodes={nodes}", sweep=sweep)))
        done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_the_number_of_nodes_changes_nothing_else(asked):
    four, sixty_four = (slurm.render(asked(f"launch.nodes={nodes}")).splitlines() for nodes in (4, 64))
    assert len(four) == len(sixty_four)
    for one, other in zip(four, sixty_four, strict=True):
        assert one == other or re.sub(r"(?<![-\w])4\b", "64", one) == other


def faked(folder: Path, srun: str, python: str) -> dict[str, str]:
    """The variables of a Slurm job on one node in which srun, after its options, and Python do this instead."""
    folder.mkdir()
    (folder / "srun").write_text(f'#!/bin/bash\nwhile [ "$1" != bash ]; do shift; done\n{srun}\n')
    (folder / "scontrol").write_text('#!/bin/bash\n[ "$2" = hostnames ] && echo n1 || echo State=IDLE\n')
    (folder / "python").write_text(f"#!/bin/bash\n{python}")
    for path in folder.iterdir():
        path.chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": "1", "SLURMD_NODENAME": "n1"}
    return os.environ | slurm | {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_values_reach_the_processes_unharmed(asked, tmp_path, monkeypatch):
    """Quotes, blanks and dollars in settings and variables come through the script, the function and srun's bash."""
    monkeypatch.chdir(tmp_path)
    python = (
        'case "$2" in\n*inside) shift 2; [ "$1" = before ] && echo start n1 || echo end ;;\n'
        '*) printf "%s|" "$NOTE" "$@" >"$OUT" ;;\nesac\n'
    )
    note = 'it\'s a "test" of $HOME `date`'
    talk = 'launch.setup=["echo setup lines may print", "true && true"]'
    wanted = asked(f"launch.environment={json.dumps({'NOTE': note})}", "run.dir=a run's dir", talk)
    script = tmp_path / "job.sh"
    script.write_text(slurm.render(wanted))
    out = tmp_path / "out"
    environment = faked(tmp_path / "bin", 'exec "$@"', python) | {"OUT": str(out)}
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
    heard, *arguments = out.read_text().split("|")
    assert heard == note and arguments[:2] == ["-m", "jaxmnt.train"]
    assert f"run.dir={Path.cwd()}/a run's dir" in arguments


def test_what_a_refusal_advises_is_handed_on_and_done_once(tiny_file, tmp_path, monkeypatch, capsys):
    """Started again in an allocation, and requeued, a job knows that --fresh is done."""
    monkeypatch.chdir(tmp_path)
    flags = ["--accept-changes", "--fresh"]
    assert main(["slurm", "--config", str(tiny_file), *CLUSTER, *flags, "--dry-run"]) == 0
    script, out = tmp_path / "job.sh", tmp_path / "out"
    script.write_text(capsys.readouterr().out)
    python = (
        'case "$*" in\n*inside\\ before*) echo start n1 ;;\n*"after"*"--start 0"*) echo again ;;\n'
        '*inside*) echo end ;;\n*) echo "$JAXMNT_RUN_KEY $SLURM_JOB_ID $SLURM_RESTART_COUNT $*" >>"$OUT" ;;\nesac\n'
    )
    environment = faked(tmp_path / "bin", '$WITHOUT "$@"', python) | {"OUT": str(out)}
    for count in ("0", "1"):
        subprocess.run(["bash", str(script)], env=environment | {"SLURM_RESTART_COUNT": count}, check=True, timeout=30)
    starts = [line.split() for line in out.read_text().splitlines()]
    assert len(starts) == 4 and all(set(flags) <= set(start) for start in starts)
    seen = [dict(zip((RUN_KEY, "SLURM_JOB_ID", "SLURM_RESTART_COUNT"), start, strict=False)) for start in starts]
    begun = RunFile(run="r", lineage=[], begun_by=fresh.job_identifiers(seen[0]))
    assert all(fresh.was_begun_by_this_job(begun, one) for one in seen[1:])
    assert not fresh.was_begun_by_this_job(begun, seen[0] | {RUN_KEY: "of another job"})
    without = environment | {"WITHOUT": f"env -u {RUN_KEY}", "SLURM_RESTART_COUNT": "0"}
    done = subprocess.run(["bash", str(script)], env=without, capture_output=True, text=True, timeout=30)
    assert "--fresh: JAXMNT_RUN_KEY is not set" in done.stderr and len(out.read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("kind", "host", "heard"),
    [("peer_lost", "n2", True), ("failed", "n2.cluster", True), ("checkpoint_failed", "n2", False),
     ("failed", "n22", False), ("failed", "login", False)],
)  # fmt: skip
def test_the_script_hears_of_a_failure(asked, tmp_path, monkeypatch, kind, host, heard):
    """In the events as they are written, of the nodes of the start."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    (tmp_path / "launch").mkdir()
    began = tmp_path / "launch" / "began"
    began.touch()
    os.utime(began, (1, 1))
    events = Events(tmp_path, 1)
    events.write("start")
    events.write(kind, why="x")
    events.close()
    function = re.search(r"^a_task_has_failed\(\) \{.*?^\}", slurm.render(asked()), re.DOTALL | re.MULTILINE)[0]
    text = f'run_dir="{tmp_path}"\nnodes=n1,n2\n{function}\na_task_has_failed'
    assert (subprocess.run(["bash", "-c", text], capture_output=True).returncode == 0) == heard


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["launch.nodes=3"],
            "1024 rows cannot be split evenly among 24 batch shards (mesh data 24); use 1008 or 1032",
        ),
        (["launch.nodes=2", "mesh.fsdp=5"], "mesh.fsdp=5 needs a multiple of 5 devices, and 16 devices are available"),
        (["launch.environment={HF_TOKEN: x}"], "HF_TOKEN looks like a secret"),
        (["launch.environment={1A: x}"], "is not a valid variable name"),
        (["launch.mounts=[data]"], "is not of the form FOLDER:/PATH/IN/CONTAINER"),
        (["slurm.options=['x']"], "is not an option such as"),
        (["launch.nodes=0"], "launch.nodes"),
        (["launch.hours=0.05"], "launch.hours: 0.05 hours must be longer than launch.warning_seconds (300 s)"),
    ],
)
def test_what_cannot_be_launched(asked, settings, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        asked(*settings)


@pytest.mark.parametrize("sweep", [(), ("seed=1,2",)])
def test_a_job_trains_in_the_run_directory_that_its_script_uses(tmp_path, tiny_file, monkeypatch, sweep):
    """In folders whose names mean something in YAML."""
    for name in ("Project #2", "a: b", "{x}", 'it\'s "x"', "%j"):
        (tmp_path / name / "x").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / name / "x")
        script = slurm.render(make_job(tiny_file, [*CLUSTER, "run.dir=runs/x", "checkpoint.dir=kept"], list(sweep)))
        head = script[: script.index("# By it the processes know")].replace("cd ", ": ", 1)
        done = subprocess.run(
            ["bash", "-c", f'{head}\nprintf "%s\\0" "$run_dir" "${{arguments[@]}}"'],
            env=os.environ | {"SLURM_ARRAY_TASK_ID": "1"}, capture_output=True, text=True,
        )  # fmt: skip
        run_dir, _, config_file, *settings = done.stdout.split("\0")[:-1]
        assert load_config(tiny_file, settings).run.dir == run_dir
        assert run_dir.startswith(f"{tmp_path}/{name}/x/"), config_file


def test_a_sweep_is_a_job_array_with_a_run_each(asked):
    wanted = asked(sweep=["seed=1,2", "optimizer.learning_rate=1e-3,3e-4"])
    assert len(wanted.sweep) == 4 and wanted.sweep[1] == ["seed=1", "optimizer.learning_rate=3e-4"]
    script = slurm.render(wanted)
    assert f"    3) arguments+=(seed=2 optimizer.learning_rate=3e-4 run.dir={wanted.run_dir}/3) ;;" in script
    assert 'run_dir="$run_dir/$SLURM_ARRAY_TASK_ID"' in script
    with pytest.raises(ConfigError, match="is not key=VALUE,VALUE"):
        asked(sweep=["seed"])
    with pytest.raises(ConfigError, match="global_batch_size"):
        asked(sweep=["data.global_batch_size=1024,1025"])


@pytest.mark.parametrize("place", ["/kept/a b", "gs://bucket/a/"])
def test_each_task_of_a_sweep_has_its_own_checkpoints(asked, tiny_file, place):
    wanted = asked(f"checkpoint.dir={place}", sweep=["seed=1,2"])
    own = [load_config(tiny_file, [*wanted.overrides, *point]).checkpoint.dir for point in wanted.sweep]
    assert own == [f"{place.rstrip('/')}/0", f"{place.rstrip('/')}/1"]
    assert shlex.quote(f"checkpoint.dir={own[1]}") in slurm.render(wanted)
    swept = asked(sweep=["checkpoint.dir=/x,/y", "seed=1,2"]).sweep
    assert [point[-1] for point in swept] == [f"checkpoint.dir=/{name}" for name in ("x/0", "x/1", "y/2", "y/3")]


def test_the_command_of_a_script_has_each_setting_once(asked):
    """What the script sets stands in place of what the user has set, since train takes no contradictions."""
    user = ["seed=5", "run.dir=runs/a", "cluster.start_timeout_seconds=5", "launch.wait_minutes=1"]
    for sweep in ([], ["seed=1,2"]):
        script = slurm.render(asked(*user, sweep=sweep))
        arguments = next(line for line in script.splitlines() if "start_timeout_seconds" in line)
        keys = [word.partition("=")[0] for word in shlex.split(arguments.partition("(")[2].rpartition(")")[0])]
        assert keys.count("cluster.start_timeout_seconds") == 1
        assert (keys.count("seed"), keys.count("run.dir")) == ((0, 0) if sweep else (1, 1))


@pytest.mark.parametrize("name", ["launch.nodes", "slurm.partition", "gke.spot", "run.dir"])
def test_what_all_tasks_of_a_sweep_share_is_no_sweep(asked, name):
    with pytest.raises(ConfigError, match=rf"--sweep: ({name} must be|each task has its own {name} already)"):
        asked(sweep=[f"{name}=1,2"])


def test_what_it_costs(asked):
    assert cost(asked("launch.nodes=2")) is None
    settings = ("launch.nodes=2", "launch.hours=10", "launch.cost_per_gpu_hour=2.5")
    assert cost(asked(*settings)) == 400 and cost(asked(*settings, sweep=["seed=1,2"])) == 800


def test_what_it_costs_is_said_as_far_as_the_cluster_limits_it(tiny_file, monkeypatch, capsys):
    """A JobSet has no time limit and no spare nodes."""
    settings = ["launch.nodes=2", "launch.spare_nodes=2", "launch.hours=10", "launch.cost_per_gpu_hour=2.5"]
    for cluster, words in (
        (slurm, "up to 800 if the job runs to its time limit"),
        (gke, "40.00 an hour; the job has no time limit"),
    ):
        monkeypatch.setattr(cluster, "submit", lambda wanted: "submitted")
        where = cluster.__name__.rpartition(".")[2]
        assert main([where, "--config", str(tiny_file), *CLUSTER, *ON_GKE, *settings]) == 0
        assert capsys.readouterr().out == f"submitted\ncost    {words}\n"


def test_the_command_prints_or_says_what_is_missing(tiny_file, tmp_path):
    arguments = ["--config", str(tiny_file), "--nodes", "2", *CLUSTER]
    printed = command("jaxmnt.launch", "slurm", *arguments, "--dry-run", "seed=7")
    assert printed.returncode == 0 and "--nodes=2" in options_of(printed.stdout), printed.stderr
    assert " seed=7 " in printed.stdout
    (tmp_path / "empty").mkdir()
    for where, tool in (("slurm", "sbatch"), ("gke", "kubectl")):
        more = ON_GKE if where == "gke" else []
        refused = command("jaxmnt.launch", where, *arguments, *more, PATH=str(tmp_path / "empty"))
        assert refused.returncode == 2 and f"{tool}: this command is not installed here" in refused.stderr


@pytest.mark.parametrize("nodes", [1, 4, 16, 64])
def test_jobs_and_pods_are_valid_kubernetes(asked, nodes):
    import kubernetes_validate

    settings = [*ON_GKE, "gke.spot=true", "gke.queue=q", "gke.service_account=trainer",
                "gke.host_network=true", "gke.memory=900Gi", "gke.priority=high", "gke.annotations={a.b/c: d}",
                "gke.pod={volumes: [{name: lib, hostPath: {path: /home/kubernetes/bin/nvidia}}], "
                "containers: [{name: train, volumeMounts: [{name: lib, mountPath: /usr/local/nvidia}]}]}"]  # fmt: skip
    wanted = asked(f"launch.nodes={nodes}", *settings)
    config, jobset = yaml.safe_load_all(gke.render(wanted))
    template = jobset["spec"]["replicatedJobs"][0]["template"]
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "run"}} | template
    pod = {"apiVersion": "v1", "kind": "Pod"} | template["spec"]["template"]
    for document in (config, whole, pod):
        kubernetes_validate.validate(document, "1.29", strict=True)
    assert whole["spec"]["completions"] == whole["spec"]["parallelism"] == nodes
    volumes = [volume["name"] for volume in pod["spec"]["volumes"]]
    (container,) = pod["spec"]["containers"]
    assert [mount["name"] for mount in container["volumeMounts"]] == volumes and container["image"]
    assert volumes == ["config", "shared-memory", "data-0", "lib"] and pod["metadata"]["annotations"] == {"a.b/c": "d"}


@pytest.mark.parametrize("nodes", [1, 4, 16, 64])
def test_jobsets_follow_their_own_schema(asked, nodes):
    path = os.environ.get("JAXMNT_JOBSET_CRD")
    if not path:
        pytest.skip("JAXMNT_JOBSET_CRD names no file with the JobSet's CustomResourceDefinition")
    import jsonschema

    crd = yaml.safe_load(Path(path).read_text())
    version = next(one for one in crd["spec"]["versions"] if one["name"] == "v1alpha2")
    schema = _strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    validator = jsonschema.Draft7Validator(schema)
    for more in ([], ["gke.topology=cloud.google.com/gke-nodepool", "gke.queue=q"]):
        _, jobset = yaml.safe_load_all(gke.render(asked(f"launch.nodes={nodes}", *ON_GKE, *more)))
        assert [error.message for error in validator.iter_errors(jobset)] == []
        broken = jobset["spec"] | {"failurePolicies": {}}
        assert list(validator.iter_errors(jobset | {"spec": broken})), "what the schema does not know is an error"


def _strict(schema):
    """An OpenAPI schema as JSON schema, in which unknown keys are errors, as they are for the API server."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _strict(value) for name, value in schema.items()}
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    free = made.get("x-kubernetes-preserve-unknown-fields")
    if made.get("type") == "object" and "properties" in made and not free:
        made.setdefault("additionalProperties", False)
    return made


def test_a_jobset_goes_by_exit_codes(asked):
    settings = ("launch.nodes=4", "run.dir=/runs/My_first run", "launch.environment={A: '1'}")
    _, jobset = gke.manifests(asked(*ON_GKE, *settings))
    rules = jobset["spec"]["failurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["FailJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
    said = "Container train for pod default/my-first-run-workers-0-3 failed with exit code {} matching FailJob rule"
    matching = lambda code: [
        rule["name"]
        for rule in rules
        if any(re.fullmatch(one, said.format(code)) for one in rule["onJobFailureMessagePatterns"])
    ]
    assert matching(2) == ["wrongConfig"] and matching(75) == ["runAgain"] and matching(1) == matching(127) == []
    container = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    name = jobset["metadata"]["name"]
    assert name.startswith("my-first-run-") and jobset["spec"]["network"]["subdomain"] == name
    assert variables["JAX_COORDINATOR_ADDRESS"] == f"{name}-workers-0-0.{name}:12355"
    assert variables["JAX_NUM_PROCESSES"] == "4" and variables["A"] == "1"


def test_the_config_in_a_manifest_is_the_run(asked, tmp_path):
    wanted = asked(*ON_GKE, "cluster.start_timeout_seconds=600")
    config, _ = yaml.safe_load_all(gke.render(wanted))
    path = tmp_path / "run.yaml"
    path.write_text(config["data"]["run.yaml"])
    again = make_job(path, [], []).config
    assert again.run.dir == "/runs/a" and again.cluster.start_timeout_seconds == 600
    assert again.model_dump(exclude={"launch"}) == wanted.config.model_dump(exclude={"launch"})


def test_names_that_kubernetes_would_refuse(asked):
    for run_dir, start in (("ABC_d.e", "abc-d-e-"), ("1b", "run-1b-"), ("x" * 90, "x" * 34 + "-"), ("___", "run-")):
        name = gke.manifests(asked(*ON_GKE, f"run.dir=/runs/{run_dir}"))[1]["metadata"]["name"]
        assert name.startswith(start) and len(f"{name}-workers-0-99999-abcde") <= 63
    one, other = (gke.manifests(asked(*ON_GKE, f"run.dir=/runs/{folder}/exp"))[1] for folder in "ab")
    assert one["metadata"]["name"] != other["metadata"]["name"], "runs of one name do not take each other's place"


@pytest.mark.parametrize(
    ("settings", "sweep", "words"),
    [
        ([], ["seed=1,2"], "one by one"),
        (["launch.image=null"], [], r"launch\.image: missing"),
        (["train.stop_after=5"], [], "a JobSet would start it again for ever"),
        (["run.dir=runs/a"], [], "is on no volume"),
    ],
)
def test_what_kubernetes_could_not_run(asked, settings, sweep, words):
    with pytest.raises(ConfigError, match=words):
        gke.manifests(asked(*ON_GKE, *settings, sweep=sweep))


def test_a_container_sees_the_run(asked):
    with pytest.raises(ConfigError, match=r"launch\.mounts: run\.dir, .* must have the same path in the container"):
        slurm.render(asked("launch.image=x", "launch.mounts=['/elsewhere:/elsewhere']"))


def test_the_config_of_a_job_is_kept(asked, tiny_file):
    wanted = asked()
    wanted.freeze()
    kept, before = wanted.frozen_file, tiny_file.read_text()
    assert kept.read_text() == before and str(kept) in slurm.render(wanted)
    tiny_file.write_text(before + "\n")
    assert str(kept) not in slurm.render(wanted), "another job has another"
    assert kept.read_text() == before


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "run")


def event(ledger, kind, process=0, **details):
    path = ledger.run_dir / "events" / f"{process}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"kind": kind, "time": time.time(), "process": process, "attempt": 0, **details}) + "\n")


def ended(ledger, code, start=0, restarts=10, cancelled=False, began=None):
    began = time.time() - 60 if began is None else began
    return after(ledger, code, began, ["n1", "n2"], start, restarts, cancelled, "7")


NOW = 1_000_000.0


def test_nodes_that_are_blamed_are_left_out_while_there_are_others(ledger):
    assert before(ledger, 2, ["n1", "n2", "n3"], ["n2"], NOW) == ("start", "n1,n3"), "somebody drains n2"
    ledger.blame("n2", "silent", NOW)
    assert before(ledger, 2, ["n1", "n2", "n3"], [], NOW) == ("start", "n1,n3")
    assert before(ledger, 2, ["n1", "n2"], [], NOW) == ("start", "n1,n2"), "better than not at all"
    assert before(ledger, 2, ["n1"], [], NOW) == ("requeue", "1 of 2 nodes answer")
    assert before(ledger, 2, ["n1", "n2", "n3"], [], NOW + 25 * 3600) == ("start", "n1,n2"), "it has served its time"
    ledger.blame("n1", "later", NOW + 5)
    assert before(ledger, 2, ["n1", "n2", "n3"], [], NOW + 9) == ("start", "n2,n3"), "the one blamed longest ago"


def test_a_lost_node_is_blamed_with_evidence(ledger):
    event(ledger, "peer_lost", 0, why="process 1 of 2 on n2 went away", at_fault=1, at_fault_host="n2.cluster.local")
    assert ended(ledger, 4) == ("again", "from step 0, without n2 if there is another")
    (bad,) = ledger.bad_nodes(time.time())
    assert (bad.node, bad.why) == ("n2", "process 1 of 2 on n2 went away")


def test_who_was_started_elsewhere_in_the_same_directory_is_no_task_of_this_start(ledger):
    event(ledger, "failed", 0, why="stopped at once", host="login", at_fault=0, at_fault_host="login")
    event(ledger, "peer_lost", 0, why="silent", host="n1", at_fault=1, at_fault_host="n2")
    assert ended(ledger, 4) == ("again", "from step 0, without n2 if there is another")


def test_a_start_that_is_told_twice_is_noted_once(ledger):
    event(ledger, "peer_lost", 0, why="silent", at_fault=1, at_fault_host="n2")
    began = time.time() - 60
    assert ended(ledger, 4, 1, began=began) == ended(ledger, 4, 1, began=began)
    assert len(ledger.starts()) == 1


def test_a_host_that_fails_its_check_or_does_not_come_is_blamed(ledger):
    event(ledger, "start_failed", 0, why="processes 1 of 2 did not connect", at_fault=1, at_fault_host=None)
    assert ended(ledger, 4)[0] == "again" and ledger.bad_nodes(time.time())[0].node == "n2"


def test_process_0_is_believed(ledger):
    """Who cannot reach process 0 blames it, and process 0 those who did not come."""
    event(ledger, "start_failed", 1, why="process 0 did not answer", at_fault=0, at_fault_host=None)
    event(ledger, "start_failed", 0, why="process 1 of 2 did not connect", at_fault=1, at_fault_host=None)
    ended(ledger, 4)
    assert [bad.node for bad in ledger.bad_nodes(time.time())] == ["n2"]


def test_an_exception_is_nobodys_hardware(ledger):
    event(ledger, "failed", 1, why="ValueError: boom", at_fault=1, at_fault_host="n2")
    event(ledger, "peer_lost", 0, why="process 1 of 2 on n2 failed: ValueError: boom", at_fault=1, at_fault_host="n2")
    assert ended(ledger, 4) == ("again", "from step 0, on the same nodes") and ledger.bad_nodes(time.time()) == []


@pytest.mark.parametrize(
    ("code", "events", "options", "action"),
    [
        (0, [("end", {"finished": True})], {}, "end"),
        (2, [], {}, "end"),
        (75, [("preempted", {"asked_by": "SIGUSR1"}), ("end", {"finished": False})], {}, "requeue"),
        (75, [("preempted", {"asked_by": "SIGTERM"}), ("end", {"finished": False})], {}, "requeue"),
        (75, [("preempted", {"asked_by": "the allocation ends"}), ("end", {"finished": False})], {}, "requeue"),
        (75, [("preempted", {"asked_by": "SIGTERM"}), ("end", {"finished": False})], {"cancelled": True}, "end"),
        (75, [("preempted", {"asked_by": "STOP"}), ("end", {"finished": False})], {}, "end"),
        (75, [("preempted", {"asked_by": None}), ("end", {"finished": False})], {}, "end"),
        (75, [("end", {"finished": False})], {}, "end"),
        (1, [("failed", {"why": "x"})], {}, "again"),
        (1, [("failed", {"why": "x"})], {"start": 10}, "requeue"),
        (1, [], {}, "requeue"),
        (137, [("start", {})], {}, "again"),
    ],
)
def test_what_follows_a_start(ledger, code, events, options, action):
    for kind, details in events:
        event(ledger, kind, **details)
    assert ended(ledger, code, **options)[0] == action


def test_the_reason_is_that_of_who_was_asked(ledger):
    """Every process notes that it stops; the end of the allocation, or one SIGTERM, is known to one of them."""
    event(ledger, "preempted", 0, asked_by="the allocation ends")
    event(ledger, "preempted", 1, asked_by=None)
    event(ledger, "end", 1, finished=False)
    assert ended(ledger, 75)[0] == "requeue"


def test_nodes_that_are_lost_one_after_the_other_do_not_end_a_run(ledger):
    lose = lambda number: event(
        ledger, "peer_lost", 0, time=time.time(), why="silent", at_fault=number % 2, at_fault_host=f"n{1 + number % 2}"
    )
    began = [time.time() - 60 + number for number in range(11)]
    for number in range(10):
        lose(number)
        assert ended(ledger, 4, began=began[number])[0] == "again", number
        for file in (ledger.run_dir / "events").iterdir():
            file.unlink()
    lose(10)
    action, why = ended(ledger, 4, began=began[10])
    assert action == "end" and why.startswith("it failed 11 times within an hour, but 0.00032 times are expected")


def test_a_node_that_fails_twice_is_handed_back(ledger):
    answers = []
    for start in range(2):
        event(ledger, "peer_lost", 0, why="silent", at_fault=1, at_fault_host="n2")
        answers.append(ended(ledger, 4, start))
    assert answers == [
        ("again", "from step 0, without n2 if there is another"), ("requeue", "n2 was tried twice here")
    ]  # fmt: skip


def test_a_device_that_breaks_is_its_hosts(ledger):
    why = "JaxRuntimeError: INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered"
    event(ledger, "failed", 1, why=why, at_fault=1, at_fault_host="n2")
    event(ledger, "peer_lost", 0, why=f"process 1 of 2 on n2 failed: {why}", at_fault=1, at_fault_host="n2")
    assert ended(ledger, 4) == ("again", "from step 0, without n2 if there is another")


def test_starts_that_slurm_cut_off_do_not_count(ledger):
    for _ in range(4):
        event(ledger, "start")
        assert ended(ledger, 143, cancelled=True)[0] == "end"
    assert ended(ledger, 137)[0] == "again"


def test_starts_that_gain_nothing_come_to_an_end(ledger):
    """Nothing before a first step; or the same failure in the same step, whose rows are named."""
    answers = []
    for start in range(5):
        event(ledger, "failed", why=f"x after {start} s")
        answers.append(ended(ledger, 1, start, began=time.time() - 60 + start))
    assert [action for action, _ in answers] == ["again"] * 4 + ["end"]
    assert answers[-1][1] == "5 starts failed in the same way, and no step was gained: x after 0 s"


def test_a_step_that_fails_again_and_again_is_named_with_its_rows(ledger):
    answers = []
    for start in range(3):
        event(ledger, "failed", why="boom", step=51, rows=[400, 407])
        answers.append(ended(ledger, 1, start, began=time.time() - 60 + start))
    assert [action for action, _ in answers] == ["again", "again", "end"]
    reason = "it failed 3 times in step 51, in the same way: boom; the rows of that step are 400 to 407"
    assert answers[-1][1] == reason


def test_records_of_an_earlier_version_still_count(ledger):
    """They have no step and no cause, but the newest checkpoint."""
    for number in range(10):
        ledger.record_start({
            "job": "7", "began": float(number), "start": number, "code": 4, "newest": 50, "blamed": None,
        })  # fmt: skip
    event(ledger, "failed", why="")
    assert [ended(ledger, 1, 0, began=time.time() - 50 + number)[0] for number in range(3)] == ["again", "again", "end"]


def test_checkpoints_after_a_fall_back_are_a_gain(ledger):
    """500 was damaged: the steps from 200 on are written again."""
    for start, step in enumerate((500, 200, 300, 400)):
        event(ledger, "checkpoint_commit", step=step)
        event(ledger, "failed", why="x")
        assert ended(ledger, 1, start) == ("again", f"from step {step}, on the same nodes")


def test_the_script_hears_words(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxmnt.launch.inside", "before", "--run-dir", str(tmp_path), "--wanted", "1",
         "--usable", "n1 n2 ", "--drained", ""], capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "start n1\n", done.stderr
