"""What is decided about a run's directory: over directories as values, and on a disk where things happen to it."""

import json
import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jaxmnt.checkpoint import commit
from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.manifest import Array, Manifest
from jaxmnt.checkpoint.refs import RunFile
from jaxmnt.config.load import parse_config
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, ExitCode, UserError
from jaxmnt.run.lock import RunLock
from jaxmnt.run.resume import ResumeFlags, decide, resume_point
from jaxmnt.run.rundir import RunDirectory, plain_config, read_directory, run_directories
from jaxmnt.telemetry.events import Events

DIGESTS = {"data": "0" * 64}
DATA = SimpleNamespace(digests=DIGESTS)
OURS, OTHERS = "0123456789ab", "ba9876543210"


def config_of(run_dir: Path, **changed):
    sections = {
        "run": {"dir": str(run_dir)},
        "data": {"synthetic": 64, "global_batch_size": 4, "sequence_length": 8},
        "model": {"hidden_size": 8, "num_layers": 1, "num_heads": 1, "intermediate_size": 8},
        "train": {"steps": 1000},
    }
    for key, value in changed.items():
        section, _, name = key.partition("__")
        sections.setdefault(section, {})[name] = value
    return parse_config(sections)


def manifest_of(run: str, step: int, lineage=()) -> Manifest:
    arrays = {f"{part}/w": Array((2, 3), "float32", "0" * 16) for part in ("params", "optimizer", "counters")}
    return Manifest(run, step, arrays, plain_config(config_of(Path("/r"))), 7, DIGESTS, None, list(lineage))


# -- directories as values

CHANGES = {
    "nothing": {},
    "the maths": {"optimizer__beta2": 0.5},
    "how it is done": {"train__log_every": 7},
    "what breaks it": {"model__hidden_size": 16},
    "too few steps": {"train__steps": 3},
    "a stop before": {"train__stop_after": 4},
}
STEPS = st.integers(5, 40)
PARENT = {"run": OTHERS, "step": 3, "path": "/other/checkpoints/3"}


@st.composite
def directories(draw) -> RunDirectory:
    """As `read_directory` may find one: what it looks for only without a checkpoint is there only then."""
    root = Path("/r/checkpoints")
    known = draw(st.sampled_from([None, RunFile(run=OURS, lineage=[]), RunFile(run=OURS, lineage=[PARENT])]))
    checkpoint = foreign_checkpoint = earlier = None
    if draw(st.booleans()):
        step = draw(STEPS)
        checkpoint = Committed(root / str(step), manifest_of(OURS, step, draw(st.sampled_from([[], [PARENT]]))))
    elif known is not None and draw(st.booleans()):
        foreign_checkpoint = Committed(root / "7", manifest_of(OTHERS, 7))
    if known is not None and draw(st.booleans()):
        step = draw(STEPS)
        earlier = Committed(Path(f"/before/checkpoints/{step}"), manifest_of(OURS, step))
    away = sorted((step, root / str(step)) for step in draw(st.sets(STEPS, max_size=3)))
    lacks = checkpoint is None
    accepted_values = [{}, {"optimizer.beta2": 0.5}, {"optimizer.beta2": 0.4}]
    return RunDirectory(
        Path("/r"), root, known, checkpoint, foreign_checkpoint, earlier, away,
        has_damaged=lacks and draw(st.booleans()),
        last_committed_step=draw(st.sampled_from([0, 20])) if lacks and known is not None else 0,
        accepted_values={} if lacks else draw(st.sampled_from(accepted_values)),
    )  # fmt: skip


@given(directories(), st.sampled_from(sorted(CHANGES)), st.booleans())
@settings(max_examples=400)
def test_a_run_goes_on_from_its_newest_checkpoint_or_begins_where_nothing_is_lost(found, change, accept):
    config, newest = config_of(Path("/r"), **CHANGES[change]), found.step
    touched = True
    try:
        decision = decide(found, config, DIGESTS, ResumeFlags(accept_changes=accept))
    except UserError as error:
        touched, refused = False, error
    assert (
        touched
        or found.foreign_checkpoint
        or (found.checkpoint_elsewhere and found.checkpoint_elsewhere.step > newest)
        or found.unreachable
    )
    if found.foreign_checkpoint is not None:
        assert refused.exit_code == ExitCode.CONFIG and f"belongs to run {OTHERS}; nothing was moved" in str(refused)
        assert f"says that this is run {OURS}" in str(refused)
    elif found.checkpoint_elsewhere is not None and found.checkpoint_elsewhere.step > newest:
        assert refused.exit_code == ExitCode.CONFIG
        assert (
            f"/before has the checkpoint of step {found.checkpoint_elsewhere.step} of /r, but the newest in /r is"
            in str(refused)
        )
    elif found.unreachable and found.unreachable[-1][0] > newest:
        assert refused.exit_code == ExitCode.FAILURE, "it may come back"
        assert f"checkpoint {found.unreachable[-1][1]} is a broken link" in str(refused)
    elif found.checkpoint is None:
        assert decision.resume is None and decision.only_damaged == found.has_damaged
        lost = found.last_committed_step and not found.has_damaged
        assert (decision.refusal is not None) == bool(lost)
        if lost:
            assert decision.refusal.exit_code == ExitCode.FAILURE
            assert f"although this run committed one of step {found.last_committed_step}" in str(decision.refusal)
    else:
        goes_on_as_decided(found, config, change, accept, decision)


def goes_on_as_decided(found, config, change, accept, decision):
    manifest = found.checkpoint.manifest
    accepted = accept or found.accepted_values == {"optimizer.beta2": 0.5}
    cannot = {"what breaks it": "a changed model.hidden_size (8 → 16)", "too few steps": "train.steps: 3 is below step",
              "a stop before": "train.stop_after: 4 must be above"}  # fmt: skip
    words = cannot.get(change) or ("--accept-changes" if change == "the maths" and not accepted else None)
    assert not decision.only_damaged and (decision.resume is None) == (words is not None)
    if words is not None:
        assert words in str(decision.refusal) and decision.refusal.exit_code == ExitCode.CONFIG
        return
    start = decision.resume
    assert (start.run_id, start.lineage, start.checkpoint, start.kind) == (
        OURS,
        manifest.lineage,
        found.checkpoint,
        "own",
    )
    assert [change.key for change in start.changes] == [key.replace("__", ".") for key in CHANGES[change]]
    differ = found.run_file is not None and found.run_file.parents != manifest.lineage
    assert [f"checkpoint {found.step} name different parent runs" in remark for remark in start.remarks] == [
        True
    ] * differ
    noted = [change.key for change in decision.changes_to_record]
    assert noted == (
        ["optimizer.beta2"] if change == "the maths" and found.accepted_values.get("optimizer.beta2") != 0.5 else []
    )


# -- directories on a disk


def held(folder: Path) -> dict[str, str]:
    """Everything below a folder but its lock: what each file holds, where each link leads."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in [*folders, *files] if not name.startswith("lock.")):
            inside = str(path.readlink()) if path.is_symlink() else path.read_text() if path.is_file() else "folder"
            found[str(path.relative_to(folder))] = inside
    return found


class ARunsDirectory(RuleBasedStateMachine):
    """Saves, damage, archives and mounts that come and go, and starts in between.

    A start goes on from the newest whole checkpoint, or says why it does not; what was saved is never removed.
    """

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.config = config_of(self.folder / "run")
        self.root = self.folder / "run" / "checkpoints"
        self.run: str | None = None
        self.steps: dict[int, str] = {}
        """What each is: whole, damaged, cut off."""
        self.links: dict[int, bool] = {}
        """Those that are links to an archive, and whether the archive is there."""
        self.set_aside = self.hidden = self.committed = False
        self.saved: list[str] = []
        """What is in a file of each checkpoint: it has to be somewhere."""

    def teardown(self):
        shutil.rmtree(self.folder)

    def place(self, step: int) -> Path:
        return (self.root / str(step)).resolve()

    def chosen(self, data, kinds, *, links=None):
        steps = [step for step, kind in self.steps.items() if kind in kinds and links in (None, step in self.links)]
        return data.draw(st.sampled_from(steps)) if steps and not self.hidden else None

    def resumed(self, **flags):
        with ExitStack() as entered:
            locks = [entered.enter_context(RunLock(where)) for where in run_directories(self.config)]
            return resume_point(self.config, DATA, Identity(), locks, flags=ResumeFlags(**flags))

    @initialize(steps=st.lists(st.tuples(st.sampled_from(["whole", "damaged", "cut off"]), st.booleans()), max_size=4))
    def first_start(self, steps):
        start = self.resumed()
        assert start.step == 0 and start.checkpoint is None
        self.run = start.run_id
        for number, (kind, archived) in enumerate(steps, 1):
            (self.save_that_is_cut_off if kind == "cut off" else self.save)()
            if kind == "damaged":
                self.harm(5 * number)
            if archived:
                self.move_to_archive(5 * number)
        self.start()

    @precondition(lambda self: not self.hidden)
    @rule()
    def save(self):
        step = max([*self.steps, 0]) + 5
        path = self.root / str(step)
        (path / "params").mkdir(parents=True)
        (path / commit.ORBAX_MARKER).write_text("1")
        self.saved.append(f"{len(self.saved)} of {self.run}")
        (path / "params" / "data").write_text(self.saved[-1])
        commit.commit(path, manifest_of(self.run, step))
        written = Events(self.folder / "run", 0)
        written.write("checkpoint_commit", step=step, seconds=0.1, bytes=1)
        written.close()
        self.steps[step], self.committed = "whole", True

    @precondition(lambda self: not self.hidden)
    @rule()
    def save_that_is_cut_off(self):
        step = max([*self.steps, 0]) + 5
        (self.root / str(step) / "params").mkdir(parents=True)
        (self.root / f"{step}.unfinished").write_text("being written\n")
        self.steps[step] = "cut off"

    @rule(data=st.data())
    def damage(self, data):
        step = self.chosen(data, ["whole"])
        if step is not None and self.links.get(step, True):
            self.harm(step)

    def harm(self, step):
        (self.place(step) / commit.ORBAX_MARKER).unlink()
        self.steps[step] = "damaged"

    @rule(data=st.data())
    def archive(self, data):
        step = self.chosen(data, ["whole", "damaged", "cut off"], links=False)
        if step is not None:
            self.move_to_archive(step)

    def move_to_archive(self, step):
        if self.steps[step] == "cut off":
            self.steps[step] = "damaged"  # the note beside it does not tell of a link
        there = Path(tempfile.mkdtemp(dir=self.folder)) / str(step)
        (self.root / str(step)).rename(there)
        (self.root / str(step)).symlink_to(there)
        self.links[step] = True

    @rule(data=st.data())
    def archive_comes_or_goes(self, data):
        step = self.chosen(data, ["whole", "damaged"], links=True)
        if step is not None:
            there = (self.root / str(step)).readlink()
            names = (there, there.with_name("away"))
            names[not self.links[step]].rename(names[self.links[step]])
            self.links[step] = not self.links[step]

    @precondition(lambda self: self.root.exists())
    @rule(leaves_a_folder=st.booleans())
    def mount_goes(self, leaves_a_folder):
        if not self.hidden:
            self.root.rename(self.folder / "hidden")
            if leaves_a_folder:
                self.root.mkdir()
            self.hidden = True

    @precondition(lambda self: self.hidden)
    @rule()
    def mount_comes(self):
        with suppress(FileNotFoundError):
            self.root.rmdir()
        (self.folder / "hidden").rename(self.root)
        self.hidden = False

    @rule()
    def start(self):
        """Twice: what the first has cleared up makes no difference to the second."""
        self.start_once()
        self.start_once()

    def start_once(self):
        before = held(self.folder)
        present = {} if self.hidden else self.steps
        here = {step: kind for step, kind in present.items() if self.links.get(step, True)}
        newest = max((step for step, kind in here.items() if kind == "whole"), default=0)
        if not self.hidden and max((step for step, there in self.links.items() if not there), default=0) > newest:
            with pytest.raises(UserError, match="is a broken link; mount or restore") as caught:
                self.resumed()
            assert caught.value.exit_code == ExitCode.FAILURE and held(self.folder) == before
            return
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("jaxmnt.run.resume.decide", self.looked_at)
            if newest:
                start = self.resumed()
                assert (start.step, start.run_id, start.kind) == (newest, self.run, "own")
                assert start.checkpoint.path == self.root / str(newest)
            elif "damaged" in here.values() or (self.set_aside and not self.hidden):
                with pytest.raises(ConfigError, match=r"no valid checkpoint is left in .*, only damaged ones"):
                    self.resumed()
            elif self.committed:
                with pytest.raises(UserError, match="although this run committed one of step") as caught:
                    self.resumed()
                assert caught.value.exit_code == ExitCode.FAILURE
            else:
                start = self.resumed()
                assert start.checkpoint is None and start.run_id == self.run
        self.cleared_up(here)

    def looked_at(self, found, *given):
        """As `decide`, which changes nothing and decides the same again."""
        before = held(self.folder)
        decision = decide(found, *given)
        again = decide(read_directory(self.config), *given)
        assert held(self.folder) == before and (again.resume, again.only_damaged) == (
            decision.resume, decision.only_damaged
        )  # fmt: skip
        return decision

    def cleared_up(self, here):
        """What is damaged lies beside, what was cut off is gone, and every save is somewhere."""
        for step, kind in here.items():
            if kind != "whole":
                self.set_aside |= kind == "damaged"
                del self.steps[step]
                self.links.pop(step, None)
        for step, kind in self.steps.items():
            assert self.hidden or kind == "whole" or not self.links[step]
        assert set(self.saved) <= set(held(self.folder).values())

    @precondition(lambda self: not self.hidden)
    @rule()
    def start_with_another_id(self):
        whole = [step for step, kind in self.steps.items() if kind == "whole" and self.links.get(step, True)]
        if not whole:
            return
        path = self.folder / "run" / "run.json"
        known = path.read_text()
        path.write_text(json.dumps({"run": OTHERS, "lineage": []}))
        before = held(self.folder)
        with pytest.raises(ConfigError, match=f"belongs to run {self.run}; nothing was moved"):
            self.resumed()
        assert held(self.folder) == before
        path.write_text(known)

    @rule()
    def start_over(self):
        start = self.resumed(fresh=True)
        assert start.step == 0 and start.run_id != self.run
        assert set(self.saved) <= set(held(self.folder).values())
        self.run, self.steps, self.links = start.run_id, {}, {}
        self.set_aside = self.committed = False
        if self.hidden:
            self.hidden = False
            (self.folder / "hidden").rename(Path(tempfile.mkdtemp(dir=self.folder)) / "forgotten")


TestARunsDirectory = ARunsDirectory.TestCase
TestARunsDirectory.settings = settings(max_examples=80, stateful_step_count=10)
