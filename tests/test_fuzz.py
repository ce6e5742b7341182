"""Whatever becomes of what jaxmnt reads back: reading it ends well or in one clear message, and nothing is lost.

A case is a reader of `readers.READERS`, the seed and a number; a failure names them. To see one with its traceback:

    python tests/test_fuzz.py "start: run.json" 17
"""

import contextlib
import hashlib
import io
import json
import random
import resource
import shutil
import signal
import stat
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from fuzz_files import BASES
from mutations import Mutation, kinds, mutate
from readers import READERS, Reader

from jaxmnt.errors import UserError

SEED = 14
QUICK, IN_CI, ALL = 10, 30, 2000
_SECONDS = 10.0
"""Far more than any case takes: what takes so long hangs."""
_GROWTH_MIB = 300
_LONGEST_MESSAGE, _MOST_LINES = 3000, 12
_SHOWN = 12


class HangsError(BaseException):
    """Raised by a timer in what takes too long. Nothing may catch it."""


@dataclass(frozen=True)
class Fault:
    """A case that came out wrong."""

    number: int
    mutation: Mutation
    what: str

    def __str__(self) -> str:
        return _printable(f"  case {self.number}: {self.mutation}\n    {self.what}")


class Bench:
    """The files around one reader: whole ones, and a copy that is damaged and read."""

    def __init__(self, reader: Reader, folder: Path, whole: Path):
        self.reader, self._whole, self._folder = reader, whole, folder
        self._copies = 0
        found = sorted(whole.glob(reader.file))
        assert found, f"there is no {reader.file}"
        self.file = str(found[0].relative_to(whole))
        self.raw = (whole / self.file).read_bytes() if reader.form != "folder" else b""
        self.kinds = kinds(reader.form, on_disk=reader.on_disk, resealed=reader.reseal is not None)
        if reader.may_be_a_pipe:
            self.kinds.remove("a pipe")
        random.Random(f"{SEED} {reader.name}").shuffle(self.kinds)
        self._hung: set[str] = set()
        self._content = snapshot(whole)
        self.renew()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            self.undamaged = None
            with contextlib.suppress(UserError):  # a line that tells of trouble
                self.undamaged = reader.read(self.copy)
        self.renew()

    def renew(self) -> None:
        """In a new place: a thread that a reader has left behind may still write to the old one."""
        if self._copies:
            shutil.rmtree(self.copy, ignore_errors=True)
        self._copies += 1
        self.copy = self._folder / f"copy-{self._copies}"
        shutil.copytree(self._whole, self.copy, symlinks=True)

    def mutation(self, number: int) -> Mutation:
        kind = self.kinds[number % len(self.kinds)]
        rng = random.Random(f"{SEED} {self.reader.name} {number}")
        return mutate(self.reader.form, kind, rng, self.raw, self.reader.reseal)

    def case(self, number: int, *, show: bool = False) -> Fault | None:
        """What is wrong with how one mutation is read, or None."""
        mutation = self.mutation(number)
        if mutation.kind in self._hung:
            return None  # it hangs each time, and has been told
        mutation.apply(self.copy / self.file)
        folder = str(self.copy)
        before = snapshot(self.copy)
        said, memory = io.StringIO(), _peak_mib()
        what: str | None
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), _limited():
                found = self.reader.read(self.copy)
            what = self.reader.fits(found, self.undamaged)
        except HangsError as error:
            self._hung.add(mutation.kind)
            what = f"hangs in {_place(error)}"
        except UserError as error:
            if show:
                traceback.print_exc()
            what = self._unclear(str(error))
            if self.reader.must_go_on:
                what = f"is refused: {error}"[:300]
        except BaseException as error:
            if show:
                traceback.print_exc()
            what = f"{type(error).__name__} in {_place(error)}: {str(error)[:150]!r}"
        after = snapshot(self.copy)
        what = what or _loud(said.getvalue()) or self._lost(before, after, mutation)
        if (grown := _peak_mib() - memory) > _GROWTH_MIB:
            what = what or f"takes {grown} MiB more memory"
        if mutation.kind in self._hung or self.reader.writes_on:
            self.renew()
        else:
            self._put_back(after)
        return None if what is None else Fault(number, mutation, what.replace(folder, ""))

    def _unclear(self, message: str) -> str | None:
        """What is wrong with a message for people."""
        odd = [letter for letter in message if not letter.isprintable() and letter not in "\n\t"]
        if odd:
            return f"the message has {odd[0]!r}: {message[:150]!r}"
        if len(message) > _LONGEST_MESSAGE or message.count("\n") >= _MOST_LINES:
            return f"the message has {len(message)} letters: {message[:150]!r}"
        path = Path(self.file)
        if not any(name in message for name in (str(self.copy), path.name, *self.reader.names)):
            return f"the message does not say where: {message[:150]!r}"
        return None

    def _lost(self, before: dict[str, str], after: dict[str, str], mutation: Mutation) -> str | None:
        if lost := gone(before, after, self.reader.may_change, self.file):
            return f"{lost[0]} is gone or was changed"
        if self.reader.keeps_lines is not None and mutation.content is not None:
            return self._lost_lines(mutation.content)
        return None

    def _lost_lines(self, content: bytes) -> str | None:
        left = (self.copy / self.file).read_bytes().split(b"\n")
        whole = set(self.raw.split(b"\n")[:-1])
        assert self.reader.keeps_lines is not None
        for line in content.split(b"\n")[:-1]:
            if line in whole and self.reader.keeps_lines(json.loads(line)) and line not in left:
                return f"a whole line is gone: {line[:80]!r}"
        return None

    def _put_back(self, after: dict[str, str]) -> None:
        """What is not as in the whole files: a copy of them all would take most of the time."""
        odd = {name for name in after.keys() | self._content.keys() if after.get(name) != self._content.get(name)}
        for name in sorted(odd & after.keys(), reverse=True):
            path = self.copy / name
            path.rmdir() if stat.S_ISDIR(_mode(path)) else path.unlink()
        for name in sorted(odd & self._content.keys()):
            whole, path = self._whole / name, self.copy / name
            if stat.S_ISDIR(_mode(whole)):
                path.mkdir()
            else:
                shutil.copy2(whole, path, follow_symlinks=False)


def snapshot(folder: Path) -> dict[str, str]:
    """All that is below a folder, by name: of files what they hold, of links where they lead."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = _mode(path)
        if stat.S_ISREG(mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            content = str(path.readlink()) if stat.S_ISLNK(mode) else str(stat.S_IFMT(mode))
        found[str(path.relative_to(folder))] = content
    return found


def gone(before: dict[str, str], after: dict[str, str], may_change: tuple[str, ...], damaged: str) -> list[str]:
    """What was there and is not any more, or holds something else. What is `damaged` may have been set aside, with its
    step if it is part of one: then it is there under another name."""
    parts = damaged.split("/")
    aside = "/".join(parts[:3]) if parts[:2] == ["run", "checkpoints"] else damaged
    kept = set(after.values())
    lost = [name for name in before if after.get(name) != before[name]]
    lost = [name for name in lost if not any(fnmatch(name, pattern) for pattern in may_change)]
    places = (aside, aside.replace("run/", "archive/"))
    return [name for name in lost if not name.startswith(places) or before[name] not in kept]


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text)


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return 0


def _loud(said: str) -> str | None:
    """What is wrong with what was printed meanwhile."""
    odd = [letter for letter in said if not letter.isprintable() and letter not in "\n\r\t"]
    if odd or len(said) > 20_000:
        return f"prints {odd[0]!r}: {said[:150]!r}" if odd else f"prints {len(said)} letters: {said[:150]!r}"
    return None


def _place(error: BaseException) -> str:
    """Where in jaxmnt it was raised."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "/jaxmnt/" in frame.filename]
    return f"{Path(own[-1].filename).name}:{own[-1].name}" if own else "a test"


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


@contextlib.contextmanager
def _limited(seconds: float = _SECONDS) -> Iterator[None]:
    """Inside, what takes longer is interrupted, also a system call that waits."""

    def interrupt(*_: Any) -> None:
        raise HangsError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def report(reader: Reader, faults: list[Fault], cases: int) -> str:
    """The faults of one reader, one of each sort."""
    sorts: dict[str, list[Fault]] = {}
    for fault in faults:
        sorts.setdefault(fault.what.partition(":")[0], []).append(fault)
    lines = [f"{reader.name}: {len(faults)} of {cases} cases, {len(sorts)} sorts (seed {SEED})"]
    for sort in sorted(sorts.values(), key=len, reverse=True)[:_SHOWN]:
        lines.append(f"{sort[0]}\n    and {len(sort) - 1} like it")
    return "\n".join(lines)


# Short waits, and whole files that are made once.


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets nobody wait for signs of life."""
    from jaxmnt.distributed import authentication, heartbeat, rendezvous, rendezvous_server
    from jaxmnt.run import lock
    from jaxmnt.telemetry import writer

    for module, names in (
        (lock, ("_SILENCE_TIMEOUT_SECONDS", "_EXIT_TIMEOUT_SECONDS", "_POLL_SECONDS")),
        (heartbeat, ("_DRAIN_TIMEOUT_SECONDS", "_LOST_PEER_TIMEOUT_SECONDS")),
        (rendezvous, ("_RETRY_SECONDS", "_RETRY_REFUSED_SECONDS", "POLL_SECONDS")),
        (rendezvous_server, ("_NOTIFY_TIMEOUT_SECONDS",)),
        (writer, ("LINE_TIMEOUT_SECONDS", "_RETRY_SECONDS")),
        (authentication, ("_FILE_TIMEOUT_SECONDS",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, 0.02)


@pytest.fixture
def hurried(monkeypatch):
    hurry(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    made: dict[str, Path] = {}

    def base(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("base") / name.replace(" ", "-")
            folder.mkdir()
            BASES[name](folder)
            made[name] = folder
        return made[name]

    return base


def _is_quick(reader: Reader) -> bool:
    return reader.base in ("records", "config") or reader.name.startswith("heartbeat")


def fuzz(reader: Reader, folder: Path, whole: Path, cases: int) -> None:
    bench = Bench(reader, folder, whole)
    faults = [fault for number in range(cases) if (fault := bench.case(number)) is not None]
    if faults:
        pytest.fail(report(reader, faults, cases), pytrace=False)


@pytest.mark.parametrize("name", [name for name, one in READERS.items() if _is_quick(one)])
def test_damage_is_refused_or_does_not_matter_quick(name, bases, tmp_path, hurried):
    fuzz(READERS[name], tmp_path, bases(READERS[name].base), QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_damage_is_refused_or_does_not_matter(name, bases, tmp_path, hurried):
    fuzz(READERS[name], tmp_path, bases(READERS[name].base), IN_CI)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", READERS)
def test_damage_is_refused_or_does_not_matter_at_length(name, bases, tmp_path, hurried):
    fuzz(READERS[name], tmp_path, bases(READERS[name].base), ALL)


def main(name: str, number: str) -> None:
    """Shows one case."""
    reader = READERS[name]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        whole = Path(folder, "whole")
        whole.mkdir()
        BASES[reader.base](whole)
        bench = Bench(reader, Path(folder), whole)
        fault = bench.case(int(number), show=True)
        print(bench.mutation(int(number)), "\n", fault or "is as it should be")


if __name__ == "__main__":
    main(*sys.argv[1:])
