"""Going on with another config: what is refused, asked about or told; starting over; finished runs."""

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import events, launch, losses, metrics

from jaxmnt import train as train_module
from jaxmnt.checkpoint.__main__ import main as checkpoint_command
from jaxmnt.checkpoint.arrays import Reader
from jaxmnt.checkpoint.commit import Committed, newest_valid, step_directories, valid_checkpoints
from jaxmnt.checkpoint.manifest import Manifest
from jaxmnt.checkpoint.refs import RunFile, find
from jaxmnt.config.describe import changes
from jaxmnt.config.load import parse_config
from jaxmnt.data.sources import fit_to_data, open_sources
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.run import fresh, training_run
from jaxmnt.run.changes import inherit_choices, rate_change, refuse_changes, steps_make_jump, unaccepted_changes
from jaxmnt.run.lock import RunLock
from jaxmnt.run.resume import ResumeFlags, ResumePoint, resume_point
from jaxmnt.run.rundir import plain_config, read_config, run_directories, write_config
from jaxmnt.train import train

pytestmark = pytest.mark.usefixtures("shared_programs")


def one_device():
    return jax.devices()[:1]


def opened(config, **flags) -> ResumePoint:
    """Where a run stands, as its start finds it; the start then ends, as if its process were killed."""
    data = open_sources(config.data)
    with ExitStack() as held:
        locks = [held.enter_context(RunLock(where)) for where in run_directories(config)]
        return resume_point(fit_to_data(config, data), data, Identity(), locks, flags=ResumeFlags(**flags))


@pytest.fixture
def going_on(tiny, whole_run):
    """A config of a run of 20 steps that shall go on to step 22; arguments are overrides."""
    shutil.copytree(whole_run.run.dir, tiny().run.dir)
    return lambda *overrides: tiny("train.steps=22", *overrides)


def held(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


OTHER_MATHS = [
    ("optimizer.learning_rate=0.001", "optimizer.learning_rate (0.003 → 0.001)"),
    ("optimizer.schedule=constant", "optimizer.schedule (cosine → constant)"),
    ("optimizer.beta2=0.99", "optimizer.beta2 (0.95 → 0.99)"),
    ("train.precision=bfloat16", "train.precision (float32 → bfloat16)"),
    ("model.rope_theta=5000.0", "model.rope_theta (10000.0 → 5000.0)"),
    ("data.on_end=stop", "data.on_end (repeat → stop)"),
]


@pytest.mark.parametrize(("override", "words"), OTHER_MATHS)
def test_other_maths_is_refused_until_it_is_accepted(going_on, override, words):
    config = going_on(override)
    run = Path(config.run.dir)
    before = held(run)
    with pytest.raises(ConfigError) as caught:
        opened(config)
    assert held(run) == before, "nothing was done"
    for told in (words, "step 20 of 22", "--accept-changes", "set another run.dir", f"run.fork_from={run}@20"):
        assert told in str(caught.value)
    start = opened(config, accept_changes=True)
    assert start.step == 20 and override.partition("=")[0] in [change.key for change in start.changes]


def test_what_was_accepted_once_needs_no_flag(going_on):
    """Also before a checkpoint has it, and while other things change that need none."""
    changed = going_on("optimizer.learning_rate=0.001")
    opened(changed, accept_changes=True)
    assert opened(changed).step == 20
    assert opened(going_on("optimizer.learning_rate=0.001", "train.microbatch_size=4")).step == 20
    with pytest.raises(ConfigError, match=r"alter its maths: optimizer\.beta1 \(0\.9 → 0\.8\); undo"):
        opened(going_on("optimizer.learning_rate=0.001", "optimizer.beta1=0.8"))
    assert opened(going_on()).step == 20, "as the checkpoint has it"
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate"):
        opened(changed)


@pytest.mark.parametrize("damage", ["a key", "a value", "no text", "emptied", "a list"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_damaged_config_of_the_run_is_said_and_the_run_goes_on(going_on, tmp_path, capfd, damage, elsewhere):
    """As without the file: the checkpoint has its own."""
    config = going_on(*([f"checkpoint.dir={tmp_path / 'big'}"] if elsewhere else []))
    run = Path(config.run.dir)
    if elsewhere:
        (tmp_path / "big").mkdir()
        shutil.move(run / "checkpoints", tmp_path / "big")
    path = run / "config.yaml"
    content = path.read_bytes()
    flipped = lambda word: content.replace(word, bytes([word[0] ^ 1]) + word[1:])
    harmed = {"a key": flipped(b"optimizer:"), "a value": flipped(b"cosine"), "no text": b"\xff\xfe" + content,
              "emptied": b"", "a list": b"[1]"}  # fmt: skip
    path.write_bytes(harmed[damage])
    assert content != harmed[damage] and opened(config).step == 20
    assert capfd.readouterr().err.count(f"note: {path} is damaged (") == 1


def test_damaged_words_of_what_was_accepted_are_said(going_on, capfd):
    changed = going_on("optimizer.learning_rate=0.001")
    opened(changed, accept_changes=True)
    path = Path(changed.run.dir) / "accepted.json"
    for content in ("", "[]", path.read_text().replace('"', "'")):
        path.write_text(content)
        with pytest.raises(ConfigError, match=r"alter its maths: optimizer\.learning_rate"):
            opened(changed)
        assert f"note: {path} is damaged: changes that it lists" in capfd.readouterr().err


def test_falling_back_behind_an_accepted_change_asks_for_nothing(going_on):
    """Restarted by itself, with a damaged checkpoint: nobody is there to give a flag."""
    changed = going_on("optimizer.learning_rate=0.001", "train.stop_after=21", "checkpoint.every_steps=1")
    assert train(changed, devices=one_device(), accept_changes=True) == ExitCode.STOPPED
    assert metrics(changed.run.dir)[20]["learning_rate"] < metrics(changed.run.dir)[19]["learning_rate"]
    keys = {event["key"] for event in events(changed.run.dir, "config_change")}
    assert {"optimizer.learning_rate", "train.steps"} <= keys
    root = Path(changed.run.dir) / "checkpoints"
    (root / "21" / "params" / "_METADATA").unlink()
    start = opened(going_on("optimizer.learning_rate=0.001"))
    assert start.step == 20 and "optimizer.learning_rate" in [change.key for change in start.changes]


def test_what_is_planned_passes_and_is_told(going_on):
    start = opened(
        going_on("train.steps=21", "data.skip=[{from_row: 400, rows: 3}]", "mesh.fsdp=2", "train.microbatch_size=4")
    )
    assert {change.key for change in start.changes} >= {"train.steps", "data.skip", "mesh.fsdp"}


def test_a_jump_of_the_learning_rate_has_to_be_accepted(going_on, tiny, capsys):
    """The rates are those of the schedules, before and after; what keeps the rate is said and does keep it."""
    run = tiny().run.dir
    with pytest.raises(ConfigError) as caught:
        opened(going_on("train.steps=40"))
    for told in (
        "train.steps (20 → 40); the learning rate of step 21 is 0.00188 instead of 0.0003", "--accept-changes",
        "optimizer.schedule=constant and optimizer.learning_rate=0.0003", f"run.fork_from={run}@10",
    ):  # fmt: skip
        assert told in str(caught.value)
    assert opened(going_on()).remarks == ["the learning rate of step 21 is 0.000381 instead of 0.0003"], "by 1.27"
    keep = ("train.steps=40", "optimizer.schedule=constant", "optimizer.learning_rate=0.0003")
    assert opened(going_on(*keep), accept_changes=True).remarks == []
    assert opened(going_on("train.steps=40"), accept_changes=True).step == 20
    assert opened(going_on("train.steps=40")).step == 20, "was accepted"
    capsys.readouterr()
    assert train(tiny(), devices=one_device()) == ExitCode.FINISHED
    shown = capsys.readouterr().out
    assert "train.steps=40 optimizer.schedule=constant optimizer.learning_rate=0.0003 --accept-changes" in shown
    branch = tiny("train.steps=40", f"run.dir={run}-branch", f"run.fork_from={run}@15")
    assert opened(branch).remarks == ["the learning rate of step 16 is 0.00242 instead of 0.0009"], "only told"


def test_a_run_that_has_begun_refuses_another_origin(going_on, tiny):
    """It would go on as it began, and say that it came from elsewhere."""
    for key in ("run.fork_from", "run.init_from"):
        with pytest.raises(ConfigError, match=f"{key}: .* began without it and is at step 20; leave {key} out"):
            opened(going_on(f"{key}=runs/other@5"))
    branch = (f"run.dir={tiny().run.dir}-branch", f"run.fork_from={tiny().run.dir}@15", "train.stop_after=17")
    going_on()
    assert train(tiny(*branch), devices=one_device()) == ExitCode.STOPPED
    with pytest.raises(ConfigError, match=r"run\.fork_from: .* began with .*@15 and is at step 17; leave"):
        opened(tiny(branch[0], f"run.fork_from={tiny().run.dir}@10"))
    assert train(tiny(branch[0], "train.stop_after=18"), devices=one_device()) == ExitCode.STOPPED
    assert opened(tiny(*branch[:2])).step == 18, "a start without it has kept it"


def test_another_vocabulary_is_other_data(going_on, tiny):
    """Although only the vocabulary shows in the config, which nobody has set."""
    other = going_on("model.vocab_size=300")
    found = find(f"{tiny().run.dir}@20", "it")
    different = changes(found.config, other)
    with pytest.raises(
        ConfigError, match=r"data: its vocabulary is not that .*320 → 300 ids.*another tokenizer made it"
    ):
        refuse_changes(other, {"data": "0" * 64}, found, different)


def test_a_jump_is_that_of_the_updates_before_a_checkpoint(going_on, whole_run, monkeypatch):
    """Bad steps are none. A jump that another key makes is not that of the steps."""
    checkpoint = find(f"{whole_run.run.dir}@20", "it")
    monkeypatch.setattr(Reader, "read", lambda *_: np.int32(16))
    assert rate_change(checkpoint, going_on("train.steps=40")) is None, "update 4 is the peak of both"
    assert not steps_make_jump(checkpoint, going_on("train.steps=40", "optimizer.learning_rate=0.1"))
    monkeypatch.undo()
    assert steps_make_jump(checkpoint, going_on("train.steps=40"))
    assert not steps_make_jump(checkpoint, going_on("optimizer.learning_rate=0.1"))


@pytest.mark.exhaustive
def test_a_run_keeps_its_zero_stage(going_on, capsys):
    """Whatever `auto` would choose now: also on another mesh, and also if a person has set it."""
    mesh = ("mesh.data=1", "mesh.fsdp=2", "train.microbatch_size=4")
    earlier = going_on(*mesh, "mesh.zero=2", "train.stop_after=21")
    assert train(earlier, devices=jax.devices()[:2]) == ExitCode.STOPPED
    assert "changed mesh.zero: 3 → 2 (harmless)" in capsys.readouterr().out
    later = going_on("mesh.data=1", "mesh.fsdp=4", "train.microbatch_size=1")
    assert later.mesh.zero == "auto" and train(later, devices=jax.devices()[:4]) == ExitCode.FINISHED
    told = capsys.readouterr().out
    assert "zero    2, as this run began (mesh.zero: auto)" in told and "changed mesh.zero" not in told
    assert read_config(Path(later.run.dir)).mesh.zero == 2


def test_a_new_run_notes_the_zero_stage_that_was_chosen(whole_run):
    assert whole_run.mesh.zero == "auto" and read_config(Path(whole_run.run.dir)).mesh.zero == 3


def test_auto_is_what_a_run_has():
    before, now = parse_config({"mesh": {"zero": 1}}), parse_config({})
    assert changes(before, now) == [] and inherit_choices(now, before).mesh.zero == 1
    explicit = parse_config({"mesh": {"zero": 2}})
    assert [change.key for change in changes(before, explicit)] == ["mesh.zero"]
    assert inherit_choices(explicit, before).mesh.zero == explicit.mesh.zero


def test_weights_of_rows_that_were_read_are_no_plan():
    """A later change of weights passes; one of the past would let rows be read twice."""

    def config(*weight_changes):
        sources = {name: {"path": name} for name in ("a", "b")}
        changes = [{"from_step": step, "weights": {"a": weight}} for step, weight in weight_changes]
        return parse_config({"run": {"dir": "r"}, "data": {"sources": sources, "weight_changes": changes}})

    def refused(before, now, accepted=None):
        one, other = config(*before), config(*now)
        checkpoint = Committed(Path("5"), Manifest("run", 5, {}, plain_config(one), 0, {}, None, []))
        asked = unaccepted_changes(other, checkpoint, changes(one, other), accepted or {})
        return [change.key for change in asked]

    assert not refused([], [(5, 2.0)]) and not refused([(3, 1.0)], [(3, 1.0), (5, 2.0)]) and not refused([(7, 1.0)], [])
    for before, now in (([], [(4, 2.0)]), ([(3, 1.0)], [(3, 2.0)]), ([(3, 1.0)], [])):
        assert refused(before, now) == ["data.weight_changes"]
    assert not refused([], [(4, 2.0)], {"data.weight_changes": [{"from_step": 4, "weights": {"a": 2.0}}]})


def test_a_changed_entry_of_a_mapping_is_told():
    before, now = parse_config({}), parse_config({"mesh": {"rules": {"embed": ["data"]}}})
    assert {(change.key, change.resume) for change in changes(before, now)} == {
        ("mesh.rules", "harmless"), ("mesh.rules.embed", "harmless")
    }  # fmt: skip


# -- finished runs


def test_a_finished_run_looks_at_the_config_first(tiny, whole_run, capsys):
    shutil.copytree(whole_run.run.dir, tiny().run.dir)
    wrong = {
        "mesh.data=3": r"mesh: the sizes \(data=3\) multiply to 3, but the number of devices is 1",
        "mesh.fsdp=4": r"needs a multiple of 4 devices, and 1 device is available.*--devices-per-process 4",
    }
    for override, words in (wrong | {"seed=1": r"seed \(0 → 1\)"}).items():
        with pytest.raises(ConfigError, match=words):
            train(tiny(override), devices=one_device())
    assert "This run is finished" not in capsys.readouterr().out
    assert train(tiny("optimizer.learning_rate=0.001"), devices=one_device()) == ExitCode.FINISHED
    shown = capsys.readouterr().out
    assert "This run is finished" in shown and "changed optimizer.learning_rate: 0.003 → 0.001" in shown
    with pytest.raises(ConfigError, match=r"alter its maths: optimizer\.learning_rate"):
        opened(tiny("optimizer.learning_rate=0.001", "train.steps=22"))


# -- starting over


def test_starting_over_sets_the_run_aside(tiny, whole_run, capsys):
    config = tiny("train.stop_after=2", "optimizer.learning_rate=0.001")
    run = Path(config.run.dir)
    shutil.copytree(whole_run.run.dir, run)
    (run / "notes.txt").write_text("a person's")
    (run / "logs").mkdir()
    (run / "logs" / "0.txt").write_text("the launcher's")
    before = held(run)
    assert train(config, devices=one_device(), fresh=True) == ExitCode.STOPPED
    shown = capsys.readouterr().out
    assert f"the run that was in {run} is set aside in {run / 'aside-1'}" in shown and "from the start" in shown
    assert "to continue, raise train.stop_after" in shown
    after = held(run)
    for name, content in before.items():
        stays = name in ("notes.txt", "logs/0.txt")
        assert after[name if stays else f"aside-1/{name}"] == content
    assert [line["step"] for line in metrics(run)] == [1, 2]
    old, new = (json.loads((folder / "run.json").read_text())["run"] for folder in (run / "aside-1", run))
    assert old != new
    assert checkpoint_command(["verify", str(run / "aside-1")]) == ExitCode.FINISHED
    opened(tiny(), fresh=True)
    assert [step for step, _ in step_directories(run / "aside-2" / "checkpoints")] == [2]
    assert newest_valid(run / "checkpoints") is None and len(losses(run / "aside-1")) == 20


def test_starting_over_where_there_is_nothing(tiny):
    config = tiny()
    assert opened(config, fresh=True).step == 0 and not list(Path(config.run.dir).glob("aside*"))


def test_links_lead_where_they_led_after_starting_over(tiny, whole_run, tmp_path):
    """The folder of checkpoints is a link to a scratch disk, a step one to an archive; both are relative."""
    config = tiny()
    run, scratch = Path(config.run.dir), tmp_path / "scratch"
    shutil.copytree(whole_run.run.dir, run)
    (run / "checkpoints").rename(scratch)
    (run / "checkpoints").symlink_to("../scratch")
    (scratch / "15").rename(tmp_path / "15")
    (scratch / "15").symlink_to("../15")
    (scratch / "others").mkdir()
    before = held(tmp_path / "15")
    opened(config, fresh=True)
    assert (run / "checkpoints").resolve() == scratch, "the next run's go there, too"
    assert sorted(path.name for path in scratch.iterdir()) == ["aside-1", "others"]
    assert [found.step for found in valid_checkpoints(run / "aside-1" / "checkpoints")] == [10, 15, 20]
    assert held(tmp_path / "15") == before and checkpoint_command(["verify", str(run / "aside-1")]) == 0


def test_starting_over_with_checkpoints_elsewhere(tiny, whole_run, tmp_path):
    config = tiny(f"checkpoint.dir={tmp_path / 'big'}")
    shutil.copytree(whole_run.run.dir, config.run.dir)
    (tmp_path / "big").mkdir()
    shutil.move(Path(config.run.dir) / "checkpoints", tmp_path / "big")
    shutil.copy(Path(config.run.dir) / "run.json", tmp_path / "big")
    assert opened(config, fresh=True).step == 0
    assert [found.step for found in valid_checkpoints(tmp_path / "big" / "aside-1" / "checkpoints")] == [10, 15, 20]
    assert (Path(config.run.dir) / "aside-1" / "metrics.jsonl").exists()
    ids = [json.loads((where / "run.json").read_text())["run"] for where in (tmp_path / "big", Path(config.run.dir))]
    assert ids[0] == ids[1] != newest_valid(tmp_path / "big" / "aside-1" / "checkpoints").manifest.run


def test_a_run_that_was_set_aside_is_found_where_its_checkpoints_are(tiny, whole_run, tmp_path):
    config = tiny(f"checkpoint.dir={tmp_path / 'big'}")
    run = Path(config.run.dir)
    shutil.copytree(whole_run.run.dir, run)
    (tmp_path / "big").mkdir()
    shutil.move(run / "checkpoints", tmp_path / "big")
    shutil.copy(run / "run.json", tmp_path / "big")
    write_config(run, config)
    opened(config, fresh=True)
    write_config(run, config)
    assert find(str(run / "aside-1"), "it").path == tmp_path / "big" / "aside-1" / "checkpoints" / "20"
    shutil.rmtree(tmp_path / "big" / "aside-1")
    words = r"aside-1 belongs to run .*, but its checkpoint\.dir .*big now belongs to run "
    with pytest.raises(ConfigError, match=words):
        find(str(run / "aside-1"), "it")


@pytest.mark.parametrize(
    ("source", "words"),
    [("{run}@4", "has no checkpoint of step 4"), ("{run}@15", "belongs to the run that --fresh sets aside")],
)
@pytest.mark.parametrize("kind", ["fork", "init"])
def test_what_cannot_begin_sets_nothing_aside(tiny, whole_run, kind, source, words):
    run = Path(tiny().run.dir)
    shutil.copytree(whole_run.run.dir, run)
    with pytest.raises(ConfigError, match=words):
        opened(tiny("train.steps=24", f"run.{kind}_from={source.format(run=run)}"), fresh=True)
    assert not (run / "aside-1").exists() and newest_valid(run / "checkpoints").step == 20


def test_a_branch_that_has_nothing_to_do(tiny, whole_run):
    config = tiny("train.steps=24", "train.stop_after=10", f"run.fork_from={whole_run.run.dir}@15")
    with pytest.raises(
        ConfigError, match=r"train\.stop_after: 10 must be above 15, the step that run\.fork_from has already reached"
    ):
        opened(config)


def test_a_job_starts_over_once(going_on, monkeypatch):
    """Its command is given again after a failure, and after Slurm has requeued it."""
    config = going_on()
    for name in ("JAXMNT_RUN_KEY", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAXMNT_RUN_KEY", "a" * 64)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    first = opened(config, fresh=True)
    again = opened(config, fresh=True)
    assert (
        again.run_id == first.run_id
        and "--fresh took effect at an earlier start of this job, so the run that it began continues" in again.remarks
    )
    assert "a" * 64 not in (Path(config.run.dir) / "run.json").read_text(), "the key is a secret"
    known = RunFile(run="r", lineage=[], begun_by=fresh.job_identifiers(os.environ))
    assert fresh.was_begun_by_this_job(known, {"JAXMNT_RUN_KEY": "a" * 64})
    assert fresh.was_begun_by_this_job(
        known, {"JAXMNT_RUN_KEY": "b" * 64, "SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1"}
    )
    for other in (
        {},
        {"JAXMNT_RUN_KEY": "b" * 64, "SLURM_JOB_ID": "77"},
        {"SLURM_JOB_ID": "78", "SLURM_RESTART_COUNT": "2"},
    ):
        assert not fresh.was_begun_by_this_job(known, other)
    monkeypatch.setenv("JAXMNT_RUN_KEY", "b" * 64)
    assert opened(config, fresh=True).run_id != first.run_id, "another job"


def test_a_run_that_is_in_use_is_not_set_aside(going_on, monkeypatch):
    from jaxmnt.run import lock

    monkeypatch.setattr(lock, "_EXIT_TIMEOUT_SECONDS", 0.1)
    config = going_on()
    before = held(Path(config.run.dir))
    with RunLock(Path(config.run.dir)) as other:
        other.acquire()
        with pytest.raises(ConfigError, match="in use by another job"):
            opened(config, fresh=True)
    assert {name: found for name, found in held(Path(config.run.dir)).items() if "lock" not in name} == before


def test_the_command_has_flags_for_both(tiny_file, monkeypatch):
    said = []
    monkeypatch.setattr(training_run, "train_in", lambda process, flags, _: said.append(flags) or ExitCode.FINISHED)
    for flags in ([], ["--accept-changes"], ["--fresh"]):
        assert train_module.main(["--config", str(tiny_file), *flags]) == ExitCode.FINISHED
    assert said == [ResumeFlags(), ResumeFlags(accept_changes=True), ResumeFlags(fresh=True)]


@pytest.mark.slow
def test_several_processes_start_over_and_wait_for_data(tiny_file, whole_run, tmp_path):
    """Process 0 sets the run aside, for all. Then data that is away for a moment is exit code 1 for all."""
    shutil.copytree(whole_run.run.dir, tmp_path / "run")
    shutil.copytree(whole_run.data.path, tmp_path / "data")
    settings = (f"data.path={tmp_path / 'data'}", "optimizer.learning_rate=0.001")
    done = launch(tiny_file, *settings, "train.stop_after=2", "--fresh", processes=2, devices=1)
    assert done.returncode == ExitCode.STOPPED, done.stdout + done.stderr
    assert len(losses(tmp_path / "run")) == 2 and len(losses(tmp_path / "run" / "aside-1")) == 20
    assert [event["attempt"] for event in events(tmp_path / "run", "start", process=1)] == [0]
    (tmp_path / "data").rename(tmp_path / "away")
    waiting = launch(tiny_file, *settings, processes=2, devices=1)
    assert waiting.returncode == ExitCode.FAILURE, waiting.stdout + waiting.stderr
    assert "is not a directory" in waiting.stdout + waiting.stderr


# -- how much an evaluation reads


def test_the_part_that_is_evaluated_follows_from_the_config_and_stays():
    """5 % of what is trained between two evaluations; a run keeps its own, one of before all that is held out."""
    shape = {"data": {"global_batch_size": 8, "sequence_length": 256}}
    of = lambda **train: parse_config(shape | {"train": train})
    assert of(eval_every=350).eval_limit == 350 * 8 * 256 // 20 and of(eval_every=0).eval_limit is None
    assert of(eval_every=350, eval_tokens=70).eval_limit == 70 and of(eval_tokens=None, eval_every=9).eval_limit is None
    begun = of(eval_every=350, eval_tokens=of(eval_every=350).eval_limit)
    later = of(eval_every=10)
    assert inherit_choices(later, begun).eval_limit == begun.eval_limit
    assert "train.eval_tokens" not in {change.key for change in changes(begun, later)}
    earlier_version = of(eval_every=350)
    assert inherit_choices(later, earlier_version).eval_limit is None
