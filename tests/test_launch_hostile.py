"""Launchers among damaged files, starts that came to nothing, and texts that must not stand in a script."""

import json
import os
import random
import re
import subprocess
import time
from pathlib import Path

import pytest

from jaxmnt.config.clusters import contains_secret, is_secret_name
from jaxmnt.errors import ConfigError, UserError
from jaxmnt.launch import gke, inside, slurm
from jaxmnt.launch.inside import Ledger
from jaxmnt.launch.inside import decide_after_start as after
from jaxmnt.launch.inside import decide_before_start as before
from jaxmnt.launch.job import make_job
from jaxmnt.launch.ledger import Outcome, event_marks, events_since
from jaxmnt.launch.local import launch, local_run
from jaxmnt.launch.restarts import Restarts
from jaxmnt.preflight.arguments import parse_arguments
from jaxmnt.telemetry.events import last_commit

CLUSTER = ["launch.gpus_per_node=8", "data.global_batch_size=1024"]
ON_GKE = ["launch.image=i", "launch.mounts=['runs:/runs']", "run.dir=/runs/a", "data.path=/runs/words"]


@pytest.fixture
def asked(tiny_file):
    return lambda *settings, sweep=(): make_job(tiny_file, [*CLUSTER, *settings], list(sweep))


# Files of the run directory that are damaged.

SOUND = {
    "bad_nodes.json": [{"node": "n2", "why": "silent", "since": 1e6, "until": 1e6 + 86400}],
    "starts.json": [
        {"time": 1e6, "began": 1e6, "job": "7", "start": 0, "nodes": ["n1", "n2"], "code": 4, "newest": 5,
         "trained": True, "cancelled": False, "blamed": "n2"}
    ],
}  # fmt: skip


def damaged(raw: bytes):
    """Bits that flip, and what a host's crash or a person leaves behind."""
    yield from (
        b"",
        b"\0" * 4096,
        raw[: len(raw) // 2],
        b"null",
        b"{}",
        b'"x"',
        b"[" * 100_000,
        b"[" * 500 + b"]" * 500,
    )
    yield from (b"[1e999]", b"[NaN]", b"[null]", b"[" + b"9" * 5000 + b"]", b"\xff\xfe", b"[[]]", b"[{}]")
    for entry in (
        {"node": 3}, {"until": "x"}, {"until": None}, {"since": 10**400}, {"why": []}, {"until": 1e300}, {"code": "4"},
        {"newest": None}, {"job": 7}, {"blamed": ["n2"]}, {"start": True}, {"began": "x"}, {"cancelled": "yes"},
    ):  # fmt: skip
        yield json.dumps([json.loads(raw)[0] | entry, *json.loads(raw)]).encode()
    rng = random.Random(0)
    for _ in range(150):
        flipped = bytearray(raw)
        flipped[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        yield bytes(flipped)


@pytest.mark.parametrize("name", SOUND)
def test_a_damaged_ledger_never_blocks_a_restart(tmp_path, capsys, name):
    folder = tmp_path / "run" / "launch"
    folder.mkdir(parents=True)
    raw = json.dumps(SOUND[name], indent=1).encode()
    told = 0
    for content in damaged(raw):
        (folder / name).write_bytes(content)
        ledger = Ledger(tmp_path / "run")
        action, nodes = before(ledger, 1, ["n1", "n2"], [], 1e6 + 5)
        assert action == "start" and nodes in ("n1", "n2"), content
        assert after(ledger, 4, time.time() - 60, ["n1"], 0, 10, False, "7")[0] in ("again", "requeue"), content
        said = capsys.readouterr().err
        aside = list(folder.glob(f"{name}.damaged-*"))
        assert bool(aside) == (f"{name} is damaged: it is set aside as" in said), "what is set aside is said"
        assert all(one.read_bytes() == content for one in aside)
        told += bool(aside)
        for path in folder.iterdir():
            path.unlink()
    assert told > 60, "most of them are seen"


def test_what_is_sound_in_a_damaged_ledger_counts_on(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.blame("n2", "silent", 1e6)
    path = tmp_path / "launch" / "bad_nodes.json"
    path.write_text(json.dumps([{"node": None}, *json.loads(path.read_text())]))
    assert [one.node for one in ledger.bad_nodes(1e6)] == ["n2"]
    assert [one.node for one in Ledger(tmp_path).bad_nodes(1e6)] == ["n2"], "it was written again without the other"
    assert sorted(one.name for one in path.parent.iterdir()) == ["bad_nodes.json", "bad_nodes.json.damaged-0"]
    path.unlink()
    path.mkdir()
    assert ledger.bad_nodes(1e6) == [] and (path.parent / "bad_nodes.json.damaged-1").is_dir()


def test_a_ledger_that_cannot_be_written_is_one_message(tmp_path):
    (tmp_path / "launch").write_text("")
    with pytest.raises(UserError, match=r"starts\.json: cannot be written: "):
        after(Ledger(tmp_path), 4, 0.0, ["n1"], 0, 10, False, "7")


def test_events_of_strange_shapes_are_passed_over(tmp_path):
    """They may be anybody's, or of another version."""
    folder = tmp_path / "run" / "events"
    folder.mkdir(parents=True)
    sound = {"kind": "peer_lost", "time": time.time(), "process": 0, "host": "n1", "attempt": 0, "why": "silent",
             "at_fault": 1, "at_fault_host": "n2"}  # fmt: skip
    strange = [{name: value for name, value in sound.items() if name != left} for left in ("time", "process")]
    for name in sound:
        strange += [sound | {name: value} for value in ([], {}, True, 10**400, -1 if name == "at_fault" else [1])]
    strange += [
        {"kind": "checkpoint_commit", "time": 1.0, "process": 0, "step": step} for step in ("9", None, True, 1e9, [])
    ]
    strange += [{"kind": kind, "time": time.time(), "process": 0} for kind in ("end", "preempted", "checkpoint_commit")]
    for one in strange:
        (folder / "0.jsonl").write_text(json.dumps(one) + "\n" + json.dumps(sound) + "\n")
        action, why = after(Ledger(tmp_path / "run"), 4, 0.0, ["n1", "n2"], 0, 10, False, str(one))
        assert (action, why) == ("again", "from step 0, without n2 if there is another") or one["kind"] == "end", one
        assert last_commit(tmp_path / "run") == 0


def test_an_unreadable_events_file_is_said(tmp_path, capsys):
    (tmp_path / "events" / "0.jsonl").mkdir(parents=True)
    assert last_commit(tmp_path) == 0
    assert "0.jsonl cannot be read: it is not a regular file" in capsys.readouterr().err


# Starts that came to nothing, and nothing was lost.


def note(run_dir: Path, kind: str, process: int = 0, **details) -> None:
    path = run_dir / "events" / f"{process}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"kind": kind, "time": time.time(), "process": process, "host": "n1", **details}) + "\n")


def in_vain(run_dir: Path, **details) -> None:
    note(run_dir, "start_abandoned", why="process 1 of 2 did not appear", reason="peers", asked_by=None,
         waited_seconds=300.0, code=75, at_fault=1, at_fault_host=None, **details)  # fmt: skip


def decided(run_dir: Path, code: int, start: int = 0, **more) -> tuple[str, str]:
    time.sleep(0.01)
    return after(Ledger(run_dir), code, time.time() - 60, ["n1", "n2"], start, 10, False, "7", **more)


@pytest.mark.parametrize("code", [75, 137, 143])
def test_a_node_that_never_appeared_is_left_out_and_counts_as_no_failure(tmp_path, code):
    """srun may tell of a straggler's death instead of the 75 of the others."""
    in_vain(tmp_path)
    left_out = ("again", "n2 did not connect; without it if there is another")
    assert decided(tmp_path, code, spare_nodes=1) == left_out
    assert decided(tmp_path, code) == left_out, "scripts of older versions do not say what they have"
    assert [one.node for one in Ledger(tmp_path).bad_nodes(time.time())] == ["n2"]
    for start in range(20):
        assert decided(tmp_path, code, start, spare_nodes=0) == ("requeue", "n2 did not connect")
    note(tmp_path, "failed", why="x")
    (tmp_path / "events" / "0.jsonl").unlink()
    note(tmp_path, "failed", why="x")
    assert decided(tmp_path, 1, 2)[0] == "again", "of what waited in vain nothing is counted"


def test_events_of_an_earlier_start_whose_clock_was_ahead_are_not_those_of_this_start(tmp_path):
    """Neither for a launcher of this machine, which knows what was there before, nor inside an allocation."""
    in_vain(tmp_path, time=time.time() + 86400)
    earlier = event_marks(tmp_path)
    note(tmp_path, "failed", why="x")
    assert [event["kind"] for event in events_since(tmp_path, earlier)] == ["failed"]
    assert [event["kind"] for event in Ledger(tmp_path).events(time.time() - 60)] == ["failed"]
    assert decided(tmp_path, 1)[0] == "again", "a failure, which is not what waited in vain is"


def test_who_failed_later_in_a_start_that_waited_in_vain_was_ended_by_it(tmp_path):
    in_vain(tmp_path)
    note(tmp_path, "failed", 1, why="stopped at once by a second signal", at_fault=1, at_fault_host="n2")
    assert decided(tmp_path, 75, spare_nodes=0)[0] == "requeue"
    note(tmp_path / "other", "peer_lost", why="it appeared, and went away", at_fault=1, at_fault_host="n2")
    in_vain(tmp_path / "other")
    assert decided(tmp_path / "other", 4) == ("again", "from step 0, without n2 if there is another")


@pytest.mark.parametrize(
    ("asked_by", "code", "action"),
    [("SIGTERM", 75, "requeue"), ("SIGUSR1", 75, "requeue"), ("SIGTERM", 143, "requeue"), ("STOP", 75, "end")],
)
def test_a_start_that_was_asked_to_stop_before_a_step(tmp_path, asked_by, code, action):
    note(tmp_path, "start_abandoned", 0, reason="stopped", asked_by=None, why="another was asked", code=75)
    note(tmp_path, "start_abandoned", 1, reason="stopped", asked_by=asked_by, why="asked", code=75)
    assert decided(tmp_path, code)[0] == action


def test_75_without_a_word_means_run_me_again(tmp_path):
    assert decided(tmp_path, 75) == ("requeue", "stopped without a recorded reason: newest checkpoint at step 0")


def test_exit_codes_mean_the_same_on_slurm_and_on_kubernetes(tmp_path, asked):
    """Also after good steps: the processes decide whether a config is wrong, or a folder away."""
    note(tmp_path, "started", step=1)
    note(tmp_path, "checkpoint_commit", step=5)
    assert decided(tmp_path, 4)[0] == "again"
    (tmp_path / "events" / "0.jsonl").unlink()
    rules = gke.manifests(asked(*ON_GKE))[1]["spec"]["failurePolicy"]["rules"]
    said = "Container train for pod default/a-workers-0-3 failed with exit code {} matching FailJob rule"
    for code, word, action in ((2, "end", "FailJobSet"), (1, "again", None), (75, "requeue", "RestartJobSetAndIgnore")):
        found = [
            rule["action"] for rule in rules
            if any(re.fullmatch(one, said.format(code)) for one in rule["onJobFailureMessagePatterns"])
        ]  # fmt: skip
        assert [one.startswith(action or "-") for one in found] == ([True] if action else [])
        note(tmp_path, "start_failed", why="data.path: /data is not there", at_fault=None, at_fault_host=None)
        if code == 75:
            (tmp_path / "events" / "0.jsonl").unlink()
            note(tmp_path, "preempted", asked_by="SIGTERM")
        assert decided(tmp_path, code, 1)[0] == word, code


def test_scripts_of_older_versions_are_understood(tmp_path, capsys):
    assert inside.main(["after", "--run-dir", str(tmp_path), "--code", "4", "--began", "1.5", "--nodes", "n1,n2",
                        "--start", "0", "--restarts", "10", "--cancelled", "no", "--job", "7"]) == 0  # fmt: skip
    assert capsys.readouterr().out == "requeue nothing was started\n"


# What must not stand in a script or a manifest.

STRANGE = ["a\nb", "a\r", "a\x1b[2J", "a\0b", "a\x85b", "a\u2028b", "a\u202eb", "a\tb", "a\x7f"]


@pytest.mark.parametrize("key", [
    "run.dir", "slurm.partition", "slurm.account", "slurm.qos", "slurm.constraint", "launch.python", "launch.image",
    "gke.namespace", "gke.queue", "gke.accelerator", "gke.service_account", "gke.priority", "gke.topology",
])  # fmt: skip
def test_texts_with_control_characters_are_refused_wherever_they_go(asked, key):
    for text in STRANGE:
        with pytest.raises(ConfigError, match=re.escape(key)) as refused:
            asked(f"{key}={json.dumps(text)}")
        assert str(refused.value).isprintable(), "they are shown as escapes"


@pytest.mark.parametrize("setting", [
    'launch.environment={A: "b\\nc"}', 'launch.setup=["a\\nb"]', 'launch.mounts=["a:/b\\nc"]',
    'slurm.options=["--mail\\n#SBATCH --x"]', 'slurm.srun_options=["--x\\ny"]', 'gke.annotations={"a\\nb": c}',
    'gke.node_selector={a: "b\\nc"}', 'gke.pod={containers: [{name: "x\\ny"}]}', 'data.path="/a\\nb"',
])  # fmt: skip
def test_lists_and_mappings_with_control_characters_are_refused(asked, setting):
    with pytest.raises(ConfigError, match="must have no line ends, control characters"):
        asked(setting)


def test_arguments_and_sweeps_with_control_characters_are_refused(asked, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="overrides: "):
        asked("launch.environment={A:\n b}")
    with pytest.raises(ConfigError, match="--sweep: "):
        asked(sweep=["seed=1,2\n"])
    folder = tmp_path / "a\nb"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"a\\nb"):
        asked()


def test_values_that_a_manifest_cannot_hold(asked):
    with pytest.raises(ConfigError, match=r"gke\.pod.*put it in quotes"):
        asked("gke.pod={a: {1: x}}")


SECRETS = re.findall(
    r"\w+",
    """
    GITHUB_PAT OPENAI_KEY AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN PASSPHRASE DB_PWD AUTH BEARER
    HF_TOKEN WANDB_API_KEY JAXMNT_RUN_KEY SSH_KEY DB_PASS PGPASSWORD SENTRY_DSN AZURE_STORAGE_SAS_TOKEN
    AZURE_STORAGE_KEY AZURE_STORAGE_CONNECTION_STRING githubToken openaiKey APIKEY API_KEY_2 OPENAI_API_KEYS
    MY_SECRET SECRET_KEY_BASE KEY PRIVATE_KEY DB_PASSWORD PASSWD CREDS GCP_CREDENTIALS BASIC_AUTH REGISTRY_AUTH
    SLACK_WEBHOOK_URL TOKEN NPM_TOKEN JWT HUGGING_FACE_HUB_TOKEN COMET_API_KEY NEPTUNE_API_TOKEN
    MLFLOW_TRACKING_PASSWORD HTTP_AUTHORIZATION SESSION_COOKIE KAGGLE_KEY SSHPASS OAUTH_SECRET
    """,
)

HARMLESS = re.findall(
    r"\w+",
    """
    TOKENIZERS_PARALLELISM NCCL_DEBUG NCCL_SOCKET_IFNAME XLA_FLAGS XLA_PYTHON_CLIENT_MEM_FRACTION KEYBOARD PATH
    JAX_COMPILATION_CACHE_KEY JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY CACHE_KEY MAX_TOKENS EOS_TOKEN SORT_KEY
    PWD HF_HUB_DISABLE_IMPLICIT_TOKEN SSH_AUTH_SOCK OLDPWD GIT_AUTHOR_NAME PYTHONPATH COMPASS BYPASS PATTERN
    PATIENCE HF_HOME HF_TOKEN_PATH GOOGLE_APPLICATION_CREDENTIALS AWS_SHARED_CREDENTIALS_FILE SECRETARY KEYWORDS
    OMP_NUM_THREADS DISPATCH TF_CPP_MIN_LOG_LEVEL PASSES PUBLIC_KEY CUDA_VISIBLE_DEVICES UCX_TLS MONKEY KEY_FORMAT
    WANDB_MODE AWS_REGION
    """,
)


def test_names_of_secrets_are_told_from_others(asked):
    assert [name for name in SECRETS if not is_secret_name(name)] == []
    assert [name for name in HARMLESS if is_secret_name(name)] == []
    for name in SECRETS[:9]:
        with pytest.raises(ConfigError, match=f"{name} looks like a secret"):
            asked(f"launch.environment={{{name}: x}}")
    asked(f"launch.environment={json.dumps(dict.fromkeys(HARMLESS, 'x'))}")


VALUES = ["ghp_" + 36 * "a", "sk-proj-abcdefghijklmnopqrst", "AKIAIOSFODNN7EXAMPLE", "hf_" + 34 * "a",
          "postgres://me:pa55@db/x", "eyJhbGciOiJI.eyJzdWIiOiIx.x"]  # fmt: skip


def test_values_that_look_like_secrets_are_refused_and_not_shown(asked):
    for value in VALUES:
        for setting in (
            f"launch.environment={{A: '{value}'}}", f"launch.setup=['export X={value}']",
            f"gke.annotations={{a: '{value}'}}",
        ):  # fmt: skip
            with pytest.raises(ConfigError, match="looks like a secret") as refused:
                asked(setting)
            assert value not in str(refused.value)
    with pytest.raises(ConfigError, match="HF_TOKEN looks like a secret"):
        asked("gke.pod={containers: [{name: train, env: [{name: HF_TOKEN, value: x}]}]}")
    asked(
        "gke.pod={containers: [{name: train, env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: a, key: b}}}]}]}"
    )
    for text in (
        "http://$USER:$PASSWORD@proxy:1",
        "registry.example:5000/x@sha256:ab",
        "gs://a/b",
        "/x/sk-a-long-name-of-it",
    ):
        assert not contains_secret(text)


# Job scripts.


def test_a_script_says_how_long_and_how_often(asked, tmp_path, monkeypatch):
    (tmp_path / "sinfo").write_text(
        "#!/bin/sh\necho 'debug|n/a|30:00'; echo 'main*|1:00:00|2-00:00:00'; echo 'long|n/a|7-00:00:00'\n"
    )
    (tmp_path / "sinfo").chmod(0o755)
    assert "time limit is that of the default partition, which sinfo --format=" in slurm.render(asked())
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "of the default partition, which is 1:00:00 (2-00:00:00 at most).\n" in slurm.render(asked())
    assert "of the partition long, which is 7-00:00:00.\n" in slurm.render(asked("slurm.partition=long"))
    for setting in ("launch.hours=2", "slurm.options=['--time=5']"):
        assert "time limit is that of" not in slurm.render(asked(setting))
    assert "# The job is requeued 1000 times at most, and in each allocation the run is started again 3 times" in (
        slurm.render(asked("launch.restarts=3"))
    )


def test_a_percent_sign_in_a_run_directory_is_itself(asked):
    script = slurm.render(asked("run.dir=/runs/a%j"))
    assert "#SBATCH --output=/runs/a%%j/logs/slurm-%j.log" in script and "run_dir=/runs/a%j" in script


def test_how_long_a_job_waits_for_its_processes(asked):
    assert "cluster.start_timeout_seconds=" not in slurm.render(asked()) and "--wait=360" in slurm.render(asked())
    script = slurm.render(asked("launch.wait_minutes=20"))
    assert " cluster.start_timeout_seconds=1200 run.dir=" in script and "--wait=1260" in script


def test_each_job_of_slurm_has_a_key_of_its_own(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = {
        "srun": 'while [ "$1" != bash ]; do shift; done\nexec "$@"',
        "scontrol": '[ "$2" = hostnames ] && echo n1 || echo State=IDLE',
        "python": 'case "$2" in\n*inside) shift 2; [ "$1" = before ] && echo start n1 || echo end ;;\n'
                  '*) echo "$JAXMNT_RUN_KEY" "$@" >>"$OUT" ;;\nesac',
    }  # fmt: skip
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script, out = tmp_path / "job.sh", tmp_path / "out"
    script.write_text(slurm.render(asked()))
    environment = dict(os.environ, PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_NODELIST="n1", SLURM_JOB_ID="1",
                       SLURMD_NODENAME="n1", OUT=str(out))  # fmt: skip
    for _ in range(2):
        subprocess.run(["bash", str(script)], env=environment, capture_output=True, check=True, timeout=30)
    one, other = out.read_text().splitlines()
    keys = {line.split()[0] for line in (one, other)}
    assert len(keys) == 2 and all(re.fullmatch("[0-9a-f]{64}", key) for key in keys)
    assert not any(key in script.read_text() or key in one.partition(" ")[2] for key in keys)


def test_restarts_that_wait_are_not_counted():
    restarts = Restarts(2, [2, 4])
    nothing, at = Outcome(None, "", ""), {"devices": 4, "now": 0.0}
    answers = [restarts.decide(75, 4, 0, nothing, waited=True, **at) for _ in range(9)]
    assert [one.processes for one in answers] == [4, *8 * [2]] and answers[-1].wait_seconds == 60.0
    assert restarts.decide(1, 2, 0, nothing, **at).why == "restart 1 of 2 in 1 s, from step 0"
    assert Restarts(0).decide(75, 4, 0, nothing, waited=True, **at).processes is None, "whoever started us has to"


def test_several_processes_need_a_config():
    """Preflight of one process does not."""
    with pytest.raises(ConfigError, match="--config: several processes need a config"):
        local_run(["train.steps=3"], 1, ("jaxmnt.preflight",), parse_arguments)


def test_file_names_are_shown_escaped(tiny_file, tmp_path):
    (tmp_path / "a\x1b[2Jb").write_text("")
    local = local_run(["--config", str(tiny_file), f"run.dir={json.dumps(str(tmp_path / 'a') + chr(27) + '[2Jb')}"], 1)
    with pytest.raises(ConfigError, match=r"a\\x1b\[2Jb/logs cannot be created"):
        launch(local, 1, Restarts(0))
