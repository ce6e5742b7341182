"""Damage of all kinds before a real resume: it is refused in a clear message, or the run ends in the very same state.

Never other numbers, and nothing outside checkpoints/ is gone afterwards. The mutations are fixed; see `mutations.py`.
"""

import contextlib
import io
import random
import shutil
from pathlib import Path

import jax
import pytest
from conftest import TINY, in_tiers, metrics, write_words
from mutations import mutate
from readers import _resealed_checkpoint, _resealed_data
from test_fuzz import HangsError, _limited, _loud, _place, gone, hurry, snapshot

from jaxmnt.checkpoint.commit import newest_valid
from jaxmnt.config.load import parse_config
from jaxmnt.data.preparation.inputs import Selection, Settings
from jaxmnt.data.preparation.run import build
from jaxmnt.errors import ExitCode, UserError
from jaxmnt.train import train

STOPPED, STEPS = 10, 14
_SECONDS = 30.0
_NEWEST, _OLDER = "run/checkpoints/10", "run/checkpoints/5"
_EVENTS, _METRICS, _PHASES = "run/events/0.jsonl", "run/metrics.jsonl", "run/phases.jsonl"

CASES = [
    # file, form, kind, and words that its details have
    ("run/run.json", "json", "truncated", ""),
    ("run/run.json", "json", "missing", ""),
    ("run/run.json", "json", "another value", "'run' becomes"),
    ("run/run.json", "json", "key removed", "'lineage'"),
    ("run/run.json", "json", "odd text", "'run' becomes '\\x1b"),
    ("run/run.json", "json", "deep nesting", "× 100000"),
    ("run/run.json", "json", "a pipe", ""),
    ("run/config.yaml", "yaml", "no UTF-8", ""),
    ("run/config.yaml", "yaml", "no such day", ""),
    ("run/config.yaml", "yaml", "missing", ""),
    ("run/config.yaml", "yaml", "truncated", ""),
    ("run/lock.json", "json", "no UTF-8", ""),
    ("run/lock.json", "json", "nested value", "× 100000"),
    ("run/lock.json", "json", "truncated", ""),
    ("run/lock.beat", "text", "random bytes", ""),
    (_METRICS, "lines", "bit flipped", ""),
    (_METRICS, "lines", "block of NULs", ""),
    (_METRICS, "lines", "line torn", ""),
    (_METRICS, "lines", "lines glued", ""),
    (_METRICS, "lines", "lines in another order", ""),
    (_METRICS, "lines", "odd number", "'step' becomes"),
    (_METRICS, "lines", "foreign line", "null"),
    (_METRICS, "lines", "a directory with a file", ""),
    (_METRICS, "lines", "missing", ""),
    (_PHASES, "lines", "line torn", ""),
    (_PHASES, "lines", "a directory with a file", ""),
    (_EVENTS, "lines", "NULs at the end", ""),
    (_EVENTS, "lines", "line twice", ""),
    (_EVENTS, "lines", "another type", "'attempt' becomes"),
    (_EVENTS, "lines", "a link to itself", ""),
    (f"{_NEWEST}/jaxmnt.json", "json", "bit flipped", ""),
    (f"{_NEWEST}/jaxmnt.json", "json", "missing", ""),
    (f"{_NEWEST}/jaxmnt.json", "json", "resealed: key removed", "/: 'manifest'"),
    (f"{_NEWEST}/jaxmnt.json", "json", "resealed: another value", "'content' becomes"),
    (f"{_OLDER}/jaxmnt.json", "json", "empty", ""),
    (f"{_NEWEST}/commit_success.txt", "text", "missing", ""),
    (f"{_NEWEST}/params/ocdbt.process_0/d/*", "text", "bit flipped", ""),
    (f"{_NEWEST}/optimizer/ocdbt.process_0/d/*", "text", "truncated", ""),
    ("run/checkpoints", "folder", "a stray file", "'mine.unfinished'"),
    ("run/checkpoints", "folder", "a stray folder", "'²'"),
    ("data/manifest.json", "json", "another value", "'tokens' becomes"),
    ("data/train/tokens-*.npy", "npy", "bit flipped", ""),
]


def _config(folder: Path, *, stop: int | None = None):
    return parse_config(
        {
            "run": {"dir": str(folder / "run")},
            "data": {"path": str(folder / "data"), "global_batch_size": 8, "sequence_length": 16, "verify": True},
            "model": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32},
            "train": TINY["train"] | {"steps": STEPS, "stop_after": stop, "eval_every": 5},
            "optimizer": {"learning_rate": 3e-3},
            "checkpoint": {"every_steps": 5, "keep": 5},
        }
    )


def _train(config) -> int:
    return train(config, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A folder with a run that stopped at step 10, and what it comes to when nothing disturbs it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "text").mkdir()
    write_words(folder / "text", files=12, words=150)
    build(Selection([folder / "text"]), folder / "data", Settings(eval_fraction=0.2), lambda *progress: None)
    assert _train(_config(folder, stop=STOPPED)) == ExitCode.STOPPED
    (folder / "run" / "lock.json").write_text(
        '{"job": "0", "host": "n1", "process": 1, "machine": "m", "started": "1"}'
    )
    (folder / "run" / "lock.beat").write_text("01234567 8")
    (folder / "run" / "kept").write_text("a person's own file")
    whole = tmp_path_factory.mktemp("whole")
    shutil.copytree(folder, whole, dirs_exist_ok=True)
    assert _train(_config(whole)) == ExitCode.FINISHED
    return folder, _losses(whole), _arrays(whole)


def _losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(folder / "run")}


def _arrays(folder: Path):
    newest = newest_valid(folder / "run" / "checkpoints")
    assert newest is not None and newest.step == STEPS
    return newest.manifest.arrays


@pytest.mark.parametrize(("file", "form", "kind", "words"), in_tiers(set(), CASES))
def test_a_resume_after_damage(undisturbed, tmp_path, monkeypatch, file, form, kind, words):
    whole, losses, arrays = undisturbed
    hurry(monkeypatch)
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    path = max(tmp_path.glob(file), key=lambda one: one.stat().st_size)
    reseal = _resealed_data if file.startswith("data/") else _resealed_checkpoint
    raw = b"" if path.is_dir() else path.read_bytes()
    mutations = (mutate(form, kind, random.Random(f"14 {file} {kind} {number}"), raw, reseal) for number in range(9000))
    mutation = next(one for one in mutations if words in one.detail)
    mutation.apply(path)
    before, said, error = snapshot(tmp_path), io.StringIO(), None
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), _limited(_SECONDS):
            code = _train(_config(tmp_path))
    except UserError as refusal:
        error, code = refusal, refusal.exit_code
    except HangsError as hang:
        pytest.fail(f"{mutation}: hangs in {_place(hang)}")
    # resources.jsonl is there if the run took longer than the first interval at which resources are told.
    told = (_METRICS, _EVENTS, _PHASES, "run/resources.jsonl")
    may_change = ("run/lock.*", *told, "run/config.yaml", "run/native/*")
    assert gone(before, snapshot(tmp_path), may_change, file) == []
    assert _loud(said.getvalue()) is None
    if error is not None:
        text = str(error)
        assert code in (ExitCode.CONFIG, ExitCode.FAILURE), f"{mutation}: {code}"
        assert str(tmp_path) in text or path.name in text, f"{mutation}: the message does not say where: {text}"
        assert len(text) < 3000 and all(letter.isprintable() or letter in "\n\t" for letter in text)
        return
    assert code == ExitCode.FINISHED
    assert _arrays(tmp_path) == arrays, f"{mutation}: another state"
    if path != tmp_path / _METRICS or path.is_file():
        found = _losses(tmp_path)
        again = {step: loss for step, loss in losses.items() if step > STOPPED}
        assert {step: loss for step, loss in found.items() if step > STOPPED} == again, f"{mutation}: other losses"


def test_no_damage_is_listed_twice():
    assert len(CASES) == len(set(CASES)) >= 40
