"""Whole runs in this process: resume, commit, evaluation, refusals."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from conftest import command, events, in_tiers, losses, metrics

from jaxmnt import generate, prepare
from jaxmnt.checkpoint.commit import newest_valid, step_directories
from jaxmnt.checkpoint.restore import restore
from jaxmnt.data.batches import EvaluationData
from jaxmnt.data.manifest import sealed
from jaxmnt.data.rows import Windows
from jaxmnt.data.sources import fit_to_data, open_sources
from jaxmnt.data.store import open_prepared
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.report.contents import report_of
from jaxmnt.train import train
from jaxmnt.training.compile import compile_program

pytestmark = pytest.mark.usefixtures("shared_programs")


def one_device():
    return jax.devices()[:1]


def final_state(config):
    """The newest checkpoint's state on the host."""
    data = open_sources(config.data)
    program = compile_program(fit_to_data(config, data), data.vocab_size, one_device())
    checkpoint = newest_valid(Path(config.run.dir) / "checkpoints")
    return jax.device_get(restore(checkpoint, program.abstract_state, Identity()).state)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_run_directory(whole_run):
    """The files and fields that other people's tools rely on."""
    run = Path(whole_run.run.dir)
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 21))
    fields = {
        "kind", "step", "time", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "step_seconds",
        "padded_tokens_per_second", "data_wait_seconds", "mfu", "hfu", "attempt", "batch_digest", "epochs", "bad_steps",
    }  # fmt: skip
    assert all(set(line) == fields for line in lines)
    assert [line["tokens"] for line in lines] == [16 * 32 * step for step in range(1, 21)]
    assert lines[0]["loss"] == pytest.approx(np.log(257), abs=0.05)
    assert [line["step"] for line in metrics(run, "eval")] == [10, 20]
    assert [step for step, _ in step_directories(run / "checkpoints")] == [10, 15, 20]
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["vocab_size"] == 320 and "cluster" not in config
    kinds = [json.loads(line)["kind"] for line in (run / "events" / "0.jsonl").read_text().splitlines()]
    assert kinds[:2] == ["start", "compile"] and kinds[-1] == "end"
    assert kinds.count("checkpoint_begin") == kinds.count("checkpoint_commit") == 4


@pytest.mark.slow
def test_learns_more_than_frequencies(tiny):
    """Given some steps the held-out loss is under that of a model that knows only how frequent each byte is."""
    config = tiny("train.steps=120", "optimizer.learning_rate=1e-2", "checkpoint.every_steps=0")
    train(config, devices=one_device())
    unigram = open_prepared(config.data.path).unigram_nats("eval")
    assert metrics(config.run.dir, "eval")[-1]["loss"] < 0.8 * unigram


@pytest.mark.parametrize(
    ("devices", "overrides"),
    in_tiers({4}, [
        (8, ["mesh.data=8"]),
        (8, ["mesh.fsdp=8"]),
        (8, ["mesh.model=4", "mesh.data=2"]),
        (8, ["mesh.fsdp=2", "mesh.model=2", "mesh.data=2"]),
        (1, ["train.microbatch_size=4"]),
    ]),
)  # fmt: skip
def test_twenty_steps_are_the_same_on_every_mesh(tiny, whole_run, devices, overrides):
    config = tiny(*overrides)
    assert train(config, devices=jax.devices()[:devices]) == ExitCode.FINISHED
    np.testing.assert_allclose(losses(config.run.dir), losses(whole_run.run.dir), rtol=1e-5)
    assert [m["batch_digest"] for m in metrics(config.run.dir)] == [
        m["batch_digest"] for m in metrics(whole_run.run.dir)
    ]


def test_stop_and_resume_is_bit_identical(tiny, whole_run):
    config = tiny("train.stop_after=10")
    assert train(config, devices=one_device()) == ExitCode.STOPPED
    assert len(losses(config.run.dir)) == 10
    assert train(tiny(), devices=one_device()) == ExitCode.FINISHED
    assert losses(config.run.dir) == losses(whole_run.run.dir)
    assert [m["batch_digest"] for m in metrics(config.run.dir)] == [
        m["batch_digest"] for m in metrics(whole_run.run.dir)
    ]
    assert_equal(final_state(config), final_state(whole_run))
    assert [event["attempt"] for event in events(config.run.dir, "start")] == [0, 1]
    assert events(config.run.dir, "restore")[0]["step"] == 10
    told = events(config.run.dir, "compile")[0]
    assert told["memory"]["peak"] > told["memory"]["params"] > 0 and told["idle_share"] == 0
    assert "expected_step_seconds" not in told  # of CPUs no rates are known
    assert {event["key"] for event in events(config.run.dir, "config_change")} == {"train.stop_after"}


@pytest.mark.parametrize(
    "damage", in_tiers({1, 3}, ["orbax marker", "our marker", "half written", "missing file", "unfinished"])
)
def test_a_checkpoint_that_is_not_committed_is_never_read(tiny, whole_run, capsys, damage):
    config = tiny()
    shutil.copytree(whole_run.run.dir, config.run.dir)
    newest = Path(config.run.dir) / "checkpoints" / "20"
    data_file = max((newest / "params").rglob("d/*"), key=lambda path: path.stat().st_size)
    if damage == "orbax marker":
        (newest / "commit_success.txt").unlink()
    elif damage == "our marker":
        (newest / "jaxmnt.json").unlink()
    elif damage == "half written":
        os.truncate(data_file, data_file.stat().st_size // 2)
    elif damage == "missing file":
        data_file.unlink()
    else:
        newest.rename(newest.with_name("20.orbax-checkpoint-tmp"))
        shutil.copytree(newest.with_name("15"), newest.with_name("5"))
        (newest.with_name("5") / "jaxmnt.json").unlink()
        newest.with_name("5.unfinished").write_text("being removed\n")
    assert train(config, devices=one_device()) == ExitCode.FINISHED
    shown = capsys.readouterr().out
    assert not list((Path(config.run.dir) / "checkpoints").glob("*.unfinished"))
    assert (f"removed {newest.with_name('5')}, which was cut off while it was being removed" in shown) == (
        damage == "unfinished"
    )
    assert "resuming after step 15" in shown
    assert ("checkpoint 20 is not used" in shown) == (damage != "unfinished")
    assert ("20.orbax-checkpoint-tmp" in shown) == (damage == "unfinished")
    assert losses(config.run.dir) == losses(whole_run.run.dir)
    assert_equal(final_state(config), final_state(whole_run))


def test_saves_cut_off_before_the_first_commit_are_no_reason_not_to_start(tiny, whole_run, capsys):
    config = tiny("train.steps=20")
    shutil.copytree(whole_run.run.dir, config.run.dir)
    for _, path in step_directories(Path(config.run.dir) / "checkpoints"):
        (path / "jaxmnt.json").unlink()
        path.with_name(f"{path.name}.unfinished").write_text("being written\n")
    shutil.rmtree(Path(config.run.dir) / "events")  # which tell of commits
    train(config, devices=one_device())
    assert "from the start" in capsys.readouterr().out
    assert losses(config.run.dir) == losses(whole_run.run.dir)


def test_nothing_but_damaged_checkpoints_is_not_trained_over(tiny, whole_run):
    """Weeks of work must not silently begin again at step 0, at the next start neither."""
    config = tiny()
    shutil.copytree(whole_run.run.dir, config.run.dir)
    for _, path in step_directories(Path(config.run.dir) / "checkpoints"):
        (path / "params" / "_METADATA").unlink()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"no valid checkpoint is left .* only damaged ones"):
            train(config, devices=one_device())
    assert len(list((Path(config.run.dir) / "checkpoints").glob("*.damaged"))) == 3


def test_finished_run_says_how_to_go_on_and_more_steps_do(tiny, whole_run, capsys):
    config = tiny()
    shutil.copytree(whole_run.run.dir, config.run.dir)
    assert train(config, devices=one_device()) == ExitCode.FINISHED
    assert "This run is finished" in capsys.readouterr().out
    assert train(tiny("train.steps=22", "mesh.data=2"), devices=jax.devices()[:2]) == ExitCode.FINISHED
    shown = capsys.readouterr().out
    assert "train.steps: 20 → 22 (changes the maths)" in shown and "mesh.data: -1 → 2 (harmless)" in shown
    assert len(losses(config.run.dir)) == 22


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed=1", ["seed (0 → 1)"]),
        ("model.num_layers=3", ["model.num_layers (2 → 3)"]),
        ("data.sequence_length=16", ["data.sequence_length"]),
        ("train.stop_after=20", []),
        ("train.steps=12", ["train.steps: 12", "step 20"]),
    ],
)
def test_what_breaks_resume_is_refused(tiny, whole_run, override, words):
    config = tiny(override)
    shutil.copytree(whole_run.run.dir, config.run.dir)
    if not words:  # already at the end: nothing to refuse
        assert train(config, devices=one_device()) == ExitCode.FINISHED
        return
    before = sorted(path.read_bytes() for path in Path(config.run.dir).rglob("*.jsonl"))
    with pytest.raises(ConfigError) as caught:
        train(config, devices=one_device())
    for word in words:
        assert word in str(caught.value)
    assert sorted(path.read_bytes() for path in Path(config.run.dir).rglob("*.jsonl")) == before


def test_stop_after_at_or_past_it_is_a_config_error(tiny):
    train(tiny("train.stop_after=5"), devices=one_device())
    for stop in (4, 5):
        with pytest.raises(ConfigError, match=rf"train\.stop_after: {stop} must be above 5"):
            train(tiny(f"train.stop_after={stop}"), devices=one_device())


def test_other_data_is_refused_and_moved_data_is_not(tiny, whole_run, tmp_path):
    config = tiny(f"data.path={tmp_path / 'moved'}", "train.steps=21")
    shutil.copytree(config.data.path if Path(config.data.path).exists() else whole_run.data.path, tmp_path / "moved")
    shutil.copytree(whole_run.run.dir, config.run.dir)
    assert train(config, devices=one_device()) == ExitCode.FINISHED
    manifest = tmp_path / "moved" / "manifest.json"
    other = {k: v for k, v in json.loads(manifest.read_text()).items() if k != "seal"} | {"eval_fraction": 0.5}
    manifest.write_text(json.dumps(sealed(other)))
    with pytest.raises(ConfigError, match=r"with other data: data has other content"):
        train(tiny(f"data.path={tmp_path / 'moved'}", "train.steps=22"), devices=one_device())


@pytest.mark.slow
def test_vocabularies(tiny):
    with pytest.raises(
        ConfigError,
        match=r"model\.vocab_size: the data has ids up to 256, and the model only 256 rows; raise it to 257",
    ):
        train(tiny("model.vocab_size=256"), devices=one_device())
    config = tiny("model.vocab_size=1024", "train.steps=5", "optimizer.warmup_steps=1")
    train(config, devices=one_device())
    # Ids that the data does not have cost nothing: the start is ln 257, not ln 1024.
    assert losses(config.run.dir)[0] == pytest.approx(np.log(257), abs=0.05)


def test_a_run_dir_that_cannot_be_made(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir: .* cannot be used: Not a directory"):
        train(tiny(f"run.dir={tmp_path / 'file' / 'run'}"), devices=one_device())


def test_missing_data(tiny, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path: .* is not a directory; .*jaxmnt\.prepare"):
        train(tiny(f"data.path={tmp_path / 'none'}"), devices=one_device())
    with pytest.raises(ConfigError, match=r"data\.path: not set"):
        train(tiny("data.path=null"), devices=one_device())
    with pytest.raises(ConfigError, match=r"data\.sequence_length: .* is more than the"):
        train(tiny("data.sequence_length=200000", "data.global_batch_size=1"), devices=one_device())


@pytest.mark.parametrize("rows", [16, 6])
def test_evaluation_is_exact_for_any_batch(tiny, whole_run, rows):
    """The mean over the held-out split equals one taken row by row, whatever the batch and mesh."""
    config = tiny(
        "train.steps=21",
        f"train.microbatch_size={'null' if rows == 16 else 2}",
        f"mesh.data={8 if rows == 16 else 4}",
    )
    shutil.copytree(whole_run.run.dir, config.run.dir)
    reference = metrics(whole_run.run.dir, "eval")[-1]
    from jaxmnt.run.evaluate import Evaluator

    data = open_sources(config.data)
    config = fit_to_data(config, data)
    program = compile_program(config, data.vocab_size, jax.devices()[: config.mesh.data])
    checkpoint = newest_valid(Path(config.run.dir) / "checkpoints")
    state = restore(checkpoint, program.abstract_state, Identity()).state
    result = Evaluator(program, data)(state)["data"]
    assert result.tokens == data.tokens("eval") == reference["tokens"]
    assert result.loss / result.tokens == pytest.approx(reference["loss"], rel=1e-6)


def test_an_evaluation_reads_a_fixed_part_of_what_is_held_out(prepared, tiny, capsys):
    """Rows evenly spaced over the split, the same each time and for any batch; the run says how many."""
    config = tiny("train.eval_tokens=100", "train.eval_every=10", "train.stop_after=10")
    [part] = open_sources(config.data).parts.values()

    def tokens(global_rows, limit):
        data = EvaluationData(config, part)
        data.limit_rows(limit)
        batches = data.batches(range(global_rows), global_rows, prefetch=1, threads=0)
        rows = np.concatenate([batch["tokens"] for batch in batches])
        return rows[: data.row_count], rows[data.row_count :]

    (whole, _), (few, filler) = tokens(16, 10**9), tokens(3, 4)
    np.testing.assert_array_equal(few, whole[np.arange(4) * len(whole) // 4])
    np.testing.assert_array_equal(few, tokens(16, 4)[0])
    assert len(few) == 4 and len(filler) == 2
    assert train(config, devices=one_device()) == ExitCode.STOPPED
    assert re.search(
        r"eval    on 100 of [\d.]+k held-out tokens, every 10 steps and at the end", capsys.readouterr().out
    )
    assert [line["tokens"] for line in metrics(config.run.dir, "eval")] == [4 * 32]


@pytest.mark.slow
def test_data_without_a_held_out_split(tiny, tmp_path):
    from conftest import write_words

    (tmp_path / "text").mkdir()
    write_words(tmp_path / "text", files=4, words=400)
    out = tmp_path / "data"
    assert (
        command(
            "jaxmnt.prepare", "--input", str(tmp_path / "text"), "--output", str(out), "--eval-fraction", "0"
        ).returncode
        == 0
    )
    config = tiny(f"data.path={out}", "train.steps=6", "train.eval_every=2")
    assert train(config, devices=one_device()) == ExitCode.FINISHED
    assert metrics(config.run.dir, "eval") == []


def test_a_signal_saves_and_exits_75(tiny, monkeypatch):
    """The first SIGTERM finishes the step, saves and returns 75; the run then goes on bit for bit."""
    from jaxmnt.data.feed import Feed

    original, calls = Feed.stage, []

    def stage(self):
        calls.append(None)
        if len(calls) == 8:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.0)  # until the thread that listens has heard it
        original(self)

    monkeypatch.setattr(Feed, "stage", stage)
    config = tiny("checkpoint.every_steps=0")
    assert train(config, devices=one_device()) == ExitCode.STOPPED
    step = len(losses(config.run.dir))
    assert 7 <= step <= 10
    assert newest_valid(Path(config.run.dir) / "checkpoints").step == step
    assert events(config.run.dir, "preempted")[0]["step"] == step
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_torn_lines_of_a_killed_run_do_not_stop_the_next(tiny):
    config = tiny("train.stop_after=10")
    train(config, devices=one_device())
    run = Path(config.run.dir)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 11, "loss": 1}\n{"kind": "train", "st')
    with (run / "events" / "0.jsonl").open("a") as file:
        file.write('{"kind": "check')
    assert train(tiny(), devices=one_device()) == ExitCode.FINISHED
    assert [line["step"] for line in metrics(run)] == list(range(1, 21))
    assert len(events(run, "start")) == 2


def test_generate_continues_a_prompt(whole_run, capfd):
    """In a process of its own as in this one."""
    arguments = ("--run", whole_run.run.dir, "--prompt", "ab", "--tokens", "12", "--seed")
    first = command("jaxmnt.generate", *arguments, "0")
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("ab") and len(first.stdout) > 3
    second, other = (generate.main([*arguments, seed]) or capfd.readouterr().out for seed in ("0", "1"))
    assert first.stdout == second != other
    with pytest.raises(ConfigError, match="neither a run directory nor a checkpoint"):
        generate.main(["--run", str(Path(whole_run.run.dir).parent)])
    with pytest.raises(ConfigError, match="window of 32"):
        generate.main(["--run", whole_run.run.dir, "--prompt", "a" * 99])


def test_window_geometry_of_the_tests(prepared):
    """The fixtures hold enough text for what the tests assume: several shards, and a part-filled last window."""
    data = open_prepared(str(prepared))
    assert len(data.manifest["splits"]["train"]["shards"]) > 3
    assert data.tokens("eval") > 1000
    windows = Windows(data.stream("eval"), 32, False)
    assert windows.row_count_with_partial == windows.rows + 1


def test_further_sets_are_evaluated_beside_what_is_held_out(tiny, prepared, tmp_path):
    """One with held-out documents, of which these count, and one without, of which all count."""
    words = tmp_path / "words.txt"
    words.write_text("one of them here, and another one\n" * 30)
    assert prepare.main(["--input", str(words), "--output", str(tmp_path / "all"), "--eval-fraction", "0"]) == 0
    sets = {"same": {"path": str(prepared)}, "all": {"path": str(tmp_path / "all")}}
    config = tiny("train.steps=2", "optimizer.warmup_steps=1", f"data.eval_sets={json.dumps(sets)}")
    assert train(config, devices=one_device()) == 0
    (line,) = metrics(config.run.dir, "eval")
    own, everything = open_prepared(prepared), open_prepared(tmp_path / "all")
    assert {name: one["tokens"] for name, one in line["sources"].items()} == {
        "data": own.tokens("eval"), "same": own.tokens("eval"), "all": everything.tokens("train"),
    }  # fmt: skip
    assert line["sources"]["same"]["loss"] == line["sources"]["data"]["loss"] == line["loss"]
    assert line["tokens"] == own.tokens("eval"), "only what is the run's own counts into the mean"
    with pytest.raises(ConfigError, match=r"data.eval_sets: 'a b' is already used, or has characters other"):
        tiny('data.eval_sets={"a b": {"path": "x"}}')


def sampled(tiny, devices, *overrides):
    """What was sampled after steps 2 and 4, and the run's directory."""
    samples = "telemetry.samples=[ab, '', {prompt: a, expect: not this}]"
    asked = [samples, "telemetry.sample_tokens=9", "train.steps=4", "train.eval_every=2"]
    config = tiny(*asked, "optimizer.warmup_steps=1", *overrides)
    assert train(config, devices=jax.devices()[:devices]) == 0
    told = events(config.run.dir, "samples")
    assert [event["step"] for event in told] == [2, 4]
    assert [line["exact_match"] for line in metrics(config.run.dir, "eval")] == [0, 0]
    for event in told:
        assert event["samples"].pop().items() >= {"prompt": "a", "expect": "not this", "exact": False}.items()
    return [[(one["prompt"], one["text"]) for one in event["samples"]] for event in told], config.run.dir


@pytest.mark.slow
def test_prompts_are_continued_after_each_evaluation(tiny, capsys):
    texts, directory = sampled(tiny, 1)
    assert capsys.readouterr().out.count("\nsample  ") == 6
    assert [[prompt for prompt, _ in one] for one in texts] == [["ab", ""], ["ab", ""]]
    (run,) = report_of([directory])["runs"]
    assert [one["step"] for one in run["samples"]] == [4, 2]
    assert [(one["prompt"], one["text"]) for one in run["samples"][0]["samples"]][:2] == texts[1]


@pytest.mark.slow
def test_samples_are_the_same_on_any_mesh(tiny, tmp_path):
    alone, _ = sampled(tiny, 1, f"run.dir={tmp_path / 'alone'}")
    split, _ = sampled(tiny, 8, f"run.dir={tmp_path / 'split'}", "mesh.pipeline=2", "mesh.model=2", "mesh.fsdp=2")
    assert split == alone


def test_tokens_that_are_no_text_cannot_be_sampled(tiny):
    with pytest.raises(ConfigError, match=r"telemetry.samples: the data does not record the tokenizer of its tokens"):
        train(tiny("data.path=null", "data.synthetic=300", "telemetry.samples=[a]"), devices=one_device())
