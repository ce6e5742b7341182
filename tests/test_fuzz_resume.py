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
from conftest import TINY, metrics, write_words
from mutations import mutate
from readers import _resealed_checkpoint, _resealed_data
from test_fuzz import HangsError, _limited, _loud, _mode, _place, hurry, snapshot

from jaxmnt.checkpoint.commit import newest_whole
from jaxmnt.config.load import parse_config
from jaxmnt.data.preparation import Selection, Settings, build
from jaxmnt.errors import ExitCode, UserError
from jaxmnt.train import train

STOPPED, STEPS = 10, 14
_SECONDS = 60.0
_NEWEST, _OLDER = "run/checkpoints/10", "run/checkpoints/5"
_EVENTS, _METRICS = "run/events/0.jsonl", "run/metrics.jsonl"

CASES = [
    # file, form, kind, number
    ("run/run.json", "json", "truncated", 0),
    ("run/run.json", "json", "missing", 0),
    ("run/run.json", "json", "another value", 1),
    ("run/run.json", "json", "key removed", 0),
    ("run/run.json", "json", "odd text", 0),
    ("run/run.json", "json", "deep nesting", 0),
    ("run/run.json", "json", "a pipe", 0),
    ("run/config.yaml", "yaml", "no UTF-8", 0),
    ("run/config.yaml", "yaml", "no such day", 0),
    ("run/config.yaml", "yaml", "missing", 0),
    ("run/config.yaml", "yaml", "truncated", 0),
    ("run/lock.json", "json", "no UTF-8", 0),
    ("run/lock.json", "json", "nested value", 0),
    ("run/lock.json", "json", "truncated", 0),
    ("run/lock.beat", "text", "random bytes", 0),
    (_METRICS, "lines", "bit flipped", 0),
    (_METRICS, "lines", "block of NULs", 0),
    (_METRICS, "lines", "line torn", 0),
    (_METRICS, "lines", "lines glued", 0),
    (_METRICS, "lines", "lines in another order", 0),
    (_METRICS, "lines", "odd number", 0),
    (_METRICS, "lines", "foreign line", 0),
    (_METRICS, "lines", "a directory with a file", 0),
    (_METRICS, "lines", "missing", 0),
    (_EVENTS, "lines", "NULs at the end", 0),
    (_EVENTS, "lines", "line twice", 0),
    (_EVENTS, "lines", "another type", 0),
    (_EVENTS, "lines", "a link to itself", 0),
    (f"{_NEWEST}/jaxmnt.json", "json", "bit flipped", 0),
    (f"{_NEWEST}/jaxmnt.json", "json", "missing", 0),
    (f"{_NEWEST}/jaxmnt.json", "json", "resealed: key removed", 0),
    (f"{_NEWEST}/jaxmnt.json", "json", "resealed: another value", 0),
    (f"{_OLDER}/jaxmnt.json", "json", "empty", 0),
    (f"{_NEWEST}/commit_success.txt", "text", "missing", 0),
    (f"{_NEWEST}/params/ocdbt.process_0/d/*", "text", "bit flipped", 0),
    (f"{_NEWEST}/optimizer/ocdbt.process_0/d/*", "text", "truncated", 0),
    ("run/checkpoints", "folder", "a stray file", 6),
    ("run/checkpoints", "folder", "an older step in an archive", 0),
    ("data/manifest.json", "json", "another value", 0),
    ("data/train/tokens-*.npy", "npy", "bit flipped", 0),
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
    (folder / "run" / "lock.json").write_text('{"job": "0", "host": "n1", "process": 1, "machine": "m", "started": "1"}')
    (folder / "run" / "lock.beat").write_text("01234567 8")
    (folder / "run" / "kept").write_text("a person's own file")
    whole = tmp_path_factory.mktemp("whole")
    shutil.copytree(folder, whole, dirs_exist_ok=True)
    assert _train(_config(whole)) == ExitCode.FINISHED
    return folder, _losses(whole), _arrays(whole)


def _losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(folder / "run")}


def _arrays(folder: Path):
    newest = newest_whole(folder / "run" / "checkpoints")
    assert newest is not None and newest.step == STEPS
    return newest.manifest.arrays


@pytest.mark.slow
@pytest.mark.parametrize(("file", "form", "kind", "number"), CASES)
def test_a_resume_after_damage(undisturbed, tmp_path, monkeypatch, file, form, kind, number):
    whole, losses, arrays = undisturbed
    hurry(monkeypatch)
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    path = max(tmp_path.glob(file), key=lambda one: one.stat().st_size)
    reseal = _resealed_data if file.startswith("data/") else _resealed_checkpoint
    raw = b"" if path.is_dir() else path.read_bytes()
    mutation = mutate(form, kind, random.Random(f"14 {file} {kind} {number}"), raw, reseal)
    mutation.apply(path)
    before, said, error = snapshot(tmp_path), io.StringIO(), None
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), _limited(_SECONDS):
            code = _train(_config(tmp_path))
    except UserError as refusal:
        error, code = refusal, refusal.exit_code
    except HangsError as hang:
        pytest.fail(f"{mutation}: hangs in {_place(hang)}")
    assert _gone(before, snapshot(tmp_path)) == []
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


def _gone(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """What lay outside checkpoints/ and does not any more, and what lay inside and is nowhere."""
    kept = set(after.values())
    inside = "run/checkpoints/"
    lost = [name for name in before if not name.startswith(inside) and name not in after and "/lock." not in name]
    return lost + [name for name, content in before.items() if name.startswith(inside) and content not in kept]


def test_there_are_forty_of_all_kinds():
    assert len(CASES) == 40 == len(set(CASES))
    assert _mode(Path("/nothing-here")) == 0
