"""Damages a checkpoint in every way that files are damaged, and sees whether that is found before it is used.

    python tests/trials/damage.py [--flips 200] [--truncations 50] [--deletions 50] [--seed 0] [--write FILE.md]

Each damage is done to a fresh copy of one checkpoint, which is then verified from its files alone, and restored on
another mesh than the one that saved it. To find damage is to raise the error that says so; a restore that returns must
return what was saved, bit for bit. Forged checkpoints (the data of one, the manifest of another) have a new list of
files with a new seal, so that nothing but the digests of the arrays can tell. Prints a table, and ends with 1 if
anything was missed, or refused by one way of reading and not by the other.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).resolve().parent))
from markdown import write_between

from jaxmnt.checkpoint import manifest as manifests
from jaxmnt.checkpoint.commit import ORBAX_MARKER, SMALL_BYTES, commit, open_checkpoint
from jaxmnt.checkpoint.export import verify
from jaxmnt.checkpoint.manifest import MANIFEST_FILE, DamagedError, Manifest, OtherFormatError
from jaxmnt.checkpoint.names import arrays_by_name, nested_arrays, unflatten_like
from jaxmnt.checkpoint.restore import restore
from jaxmnt.checkpoint.retention import SpaceNeeded
from jaxmnt.checkpoint.saver import Saver, State
from jaxmnt.config.schema import Checkpoint
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import UserError

RUN, OTHER_RUN = "5eed00000001", "5eed00000002"
STEP, OTHER_STEP = 6, 9
AXES = ("data", "fsdp")

PARAMS = {
    "embedding": ((1024, 512), jnp.float32, P("fsdp")),
    "layer/up": ((512, 768), jnp.bfloat16, P(None, "fsdp")),
    "layer/down": ((512, 768), jnp.bfloat16, P(None, "fsdp")),
    "layer/query": ((256, 256), jnp.float32, P(("data", "fsdp"))),
    "layer/key": ((256, 256), jnp.float32, P("fsdp", "data")),
    "norm/scale": ((64,), jnp.float32, P()),
}
"""Shape, dtype and partition of the parameters; both moments of the optimizer are like them."""

COUNTERS = {"step": (), "tokens": (2,), "rows": ()}

SWAPS = [
    ("params/layer/query", "params/layer/key"),
    ("params/layer/up", "params/layer/down"),
    ("optimizer/mu/embedding", "optimizer/nu/embedding"),
    ("params/norm/scale", "optimizer/mu/norm/scale"),
    ("counters/step", "counters/rows"),
]
"""Pairs of arrays of the same shape and dtype."""


@dataclass(frozen=True)
class Originals:
    """Whole checkpoints, which nothing here changes."""

    folder: Path
    checkpoint: Path
    """The one whose copies are damaged: of `RUN`, after `STEP`."""
    other_step: Path
    """Of the same run, after `OTHER_STEP`."""
    other_run: Path
    """Of another run, after `STEP`."""
    swapped: dict[tuple[str, str], Path]
    """Those in which two arrays are exchanged."""
    manifest: Manifest
    abstract: State
    """What to restore, on another mesh than the one that saved."""
    contents: dict[str, bytes]
    """What the arrays of `checkpoint` hold."""


@dataclass(frozen=True)
class Case:
    """One damage."""

    damage: str
    """Its kind, a row of the table."""
    detail: str
    """Where it is."""
    apply: Callable[[Path], None]
    """Damages the copy at this path."""
    harmful: bool = True
    """Without, it is a control, in which nothing may be found."""


@dataclass
class Row:
    """What came of all cases of a kind."""

    damage: str
    cases: int = 0
    by_verify: int = 0
    by_restore: int = 0
    harmless: int = 0
    """Nothing that counts was changed: the arrays are the same bit for bit."""
    missed: int = 0


def main() -> int:
    options = _parse()
    with tempfile.TemporaryDirectory(prefix="jaxmnt-damage-") as folder:
        originals = prepare(Path(folder), options.seed)
        chosen = cases(originals, options.flips, options.truncations, options.deletions, options.seed)
        rows = run(originals, chosen, lambda trouble: print(f"MISSED {trouble}"))
    text = table(rows)
    print(text)
    if options.write:
        write_between(options.write, "damage", text)
    return 1 if any(row.missed for row in rows) else 0


def prepare(folder: Path, seed: int) -> Originals:
    """Writes the checkpoints to start from. Needs eight devices."""
    mesh = _mesh(2, 4)
    state = _state(mesh, seed)
    names = arrays_by_name(state)
    root = folder / "run" / "checkpoints"
    checkpoint = _save(root, RUN, STEP, state)
    swapped = {}
    for number, (a, b) in enumerate(SWAPS):
        exchanged = nested_arrays(names | {a: _placed_as(names[b], names[a]), b: _placed_as(names[a], names[b])})
        swapped[a, b] = _save(folder / f"swapped{number}", RUN, STEP, exchanged)
    return Originals(
        folder=folder,
        checkpoint=checkpoint,
        other_step=_save(root, RUN, OTHER_STEP, _state(mesh, seed + 1)),
        other_run=_save(folder / "other", OTHER_RUN, STEP, _state(mesh, seed + 2)),
        swapped=swapped,
        manifest=open_checkpoint(checkpoint, RUN).manifest,
        abstract=_abstract(state, _mesh(4, 2)),
        contents={name: np.asarray(array).tobytes() for name, array in names.items()},
    )


def cases(originals: Originals, flips: int, truncations: int, deletions: int, seed: int) -> Iterator[Case]:
    """So many random cases of each kind, and every special one."""
    rng = np.random.default_rng(seed)
    files = _files(originals.checkpoint)
    small = [file for file in files if file.size <= SMALL_BYTES and file.name != MANIFEST_FILE]
    manifest = [file for file in files if file.name == MANIFEST_FILE]
    for number in range(flips):
        draws = rng.random(3)
        if number % 4:
            yield _flip("bit flip, any byte", _by_size(files, draws[0]), draws)
        elif number % 12:
            yield _flip("bit flip, small file", _at(small, draws[0]), draws)
        else:
            yield _flip(f"bit flip, {MANIFEST_FILE}", manifest[0], draws)
    filled = [file for file in files if file.size]
    for _ in range(truncations):
        draws = rng.random(2)
        yield _truncation(_at(filled, draws[0]), draws[1])
    for _ in range(deletions):
        yield _deletion("file deleted", _at(files, rng.random()).name)
    yield from _special(originals)


def run(originals: Originals, cases: Iterator[Case], tell: Callable[[str], None] = print) -> list[Row]:
    """Tries every case on a copy of its own; `tell` hears of each that was missed."""
    rows: dict[str, Row] = {}
    copy = originals.folder / "copy" / str(STEP)
    for case in cases:
        row = rows.setdefault(case.damage, Row(case.damage))
        shutil.copytree(originals.checkpoint, copy)
        try:
            case.apply(copy)
            verified, restored = _try_verify(copy), _try_restore(copy, originals)
        finally:
            shutil.rmtree(copy)
        row.cases += 1
        row.by_verify += verified == "detected"
        row.by_restore += restored == "detected"
        row.harmless += restored == "identical"
        found = (verified, restored) == ("detected", "detected")
        if not (found and case.harmful) and (verified, restored) != ("passed", "identical"):
            row.missed += 1
            tell(f"{case.damage}, {case.detail}: verify {verified}, restore {restored}")
    return list(rows.values())


def table(rows: list[Row]) -> str:
    """As Markdown, with the sum."""
    lines = ["| damage | cases | detected by verify | detected by restore | harmless | missed |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    total = Row("**all**")
    for row in rows:
        for field in ("cases", "by_verify", "by_restore", "harmless", "missed"):
            setattr(total, field, getattr(total, field) + getattr(row, field))
    for row in [*rows, total]:
        counts = (row.cases, row.by_verify, row.by_restore, row.harmless, row.missed)
        lines.append(f"| {row.damage} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


# The special cases.


def _special(originals: Originals) -> Iterator[Case]:
    manifest = originals.manifest
    for (a, b), path in originals.swapped.items():
        forged = _forgery(path, "", manifest)
        yield Case("two arrays' data swapped, list of files redone", f"{a} and {b}", forged)
    for part in ("params", "optimizer"):
        change = lambda copy, part=part: _take_data_file(originals.other_step, part, copy)
        yield Case("one process's data file of another step, under its name", part, change)
    for part in ("params", "optimizer", "counters"):
        forged = _forgery(originals.other_step, part, manifest)
        yield Case("a part of another step, list of files redone", part, forged)
    for label, path in (("another step", originals.other_step), ("another run", originals.other_run)):
        theirs = manifests.read(path)[0]
        change = lambda copy, path=path: _take(path / MANIFEST_FILE, copy / MANIFEST_FILE)
        yield Case(f"the manifest of {label}", "as it is", change)
        yield Case(f"the manifest of {label}", "list of files redone", _forgery(None, "", theirs))
        forged = _forgery(None, "", replace(theirs, run=RUN, step=STEP))
        yield Case(f"the manifest of {label}", "step and run put right, list of files redone", forged)
        yield Case(f"the checkpoint of {label} under this name", "", _forgery(path, "", theirs))
    a, b = SWAPS[0]
    contents = {a: replace(manifest.arrays[a], content=manifest.arrays[b].content)}
    forged = _forgery(None, "", replace(manifest, arrays=manifest.arrays | contents))
    yield Case("a digest of another array in the manifest, sealed anew", a, forged)
    yield Case("format version of the future", "", _another_format)
    yield _deletion(f"no {MANIFEST_FILE}", MANIFEST_FILE)
    yield _deletion(f"no {ORBAX_MARKER}", ORBAX_MARKER)
    yield Case("a directory that has only the name", "", _emptied)
    yield Case("none (control)", "", lambda copy: None, harmful=False)
    yield Case("none (control)", "list of files redone", _forgery(None, "", manifest), harmful=False)


def _forgery(source: Path | None, part: str, manifest: Manifest) -> Callable[[Path], None]:
    """Takes `part` (empty: all) from another checkpoint and commits that with `manifest`, as if it were its own."""

    def apply(copy: Path) -> None:
        if source is not None:
            shutil.rmtree(copy / part)
            shutil.copytree(source / part, copy / part)
        (copy / MANIFEST_FILE).unlink()
        commit(copy, manifest)

    return apply


def _take_data_file(source: Path, part: str, copy: Path) -> None:
    """The large file of a part from another checkpoint, under the name that the file has here."""
    mine, theirs = (max((path / part).rglob("*"), key=lambda file: file.stat().st_size) for path in (copy, source))
    assert mine.stat().st_size == theirs.stat().st_size > SMALL_BYTES
    _take(theirs, mine)


def _take(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def _another_format(copy: Path) -> None:
    before = manifests.FORMAT_VERSION
    manifest, files = manifests.read(copy)
    try:
        manifests.FORMAT_VERSION = before + 2  # the next is that of branches
        manifests.write(copy, manifest, files)
    finally:
        manifests.FORMAT_VERSION = before


def _emptied(copy: Path) -> None:
    shutil.rmtree(copy)
    copy.mkdir()


# The random cases.


@dataclass(frozen=True)
class _File:
    name: str
    size: int


def _files(checkpoint: Path) -> list[_File]:
    """All files in an order that does not depend on the random names that data files have."""
    found = [(path, path.stat().st_size) for path in checkpoint.rglob("*") if path.is_file()]
    found.sort(key=lambda pair: (str(pair[0].parent), pair[1]))
    return [_File(str(path.relative_to(checkpoint)), size) for path, size in found]


def _at(files: list[_File], draw: float) -> _File:
    return files[int(draw * len(files))]


def _by_size(files: list[_File], draw: float) -> _File:
    """A file, each as likely as it is large."""
    ends = np.cumsum([file.size for file in files])
    return files[int(np.searchsorted(ends, int(draw * ends[-1]), side="right"))]


def _flip(damage: str, file: _File, draws: np.ndarray) -> Case:
    at, bit = int(draws[1] * file.size), int(draws[2] * 8)

    def apply(copy: Path) -> None:
        with (copy / file.name).open("r+b") as stream:
            stream.seek(at)
            byte = stream.read(1)[0]
            stream.seek(at)
            stream.write(bytes([byte ^ 1 << bit]))

    return Case(damage, f"{file.name}, bit {bit} of byte {at}", apply)


def _truncation(file: _File, draw: float) -> Case:
    length = int(draw * file.size)
    apply = lambda copy: os.truncate(copy / file.name, length)
    return Case("file truncated", f"{file.name} to {length} of {file.size} bytes", apply)


def _deletion(damage: str, name: str) -> Case:
    return Case(damage, name, lambda copy: (copy / name).unlink())


# What becomes of a damaged copy.


def _try_verify(copy: Path) -> str:
    try:
        verify(copy, RUN)
    except (DamagedError, OtherFormatError):
        return "detected"
    except Exception as error:  # a crash is a result, too
        return f"crashed ({type(error).__name__}: {error})"
    return "passed"


def _try_restore(copy: Path, originals: Originals) -> str:
    try:
        state = restore(open_checkpoint(copy, RUN), originals.abstract, Identity()).state
    except UserError:
        return "detected"
    except Exception as error:  # a crash is a result, too
        return f"crashed ({type(error).__name__}: {error})"
    same = {name: np.asarray(array).tobytes() for name, array in arrays_by_name(state).items()} == originals.contents
    return "identical" if same else "different"


# States and their checkpoints.


def _mesh(data: int, fsdp: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: data * fsdp]).reshape(data, fsdp), AXES)


def _state(mesh: Mesh, seed: int) -> State:
    """Parameters, two moments of each, and counters: every element random."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for part in ("params", "optimizer/mu", "optimizer/nu"):
        for name, (shape, dtype, spec) in PARAMS.items():
            values = rng.standard_normal(shape, np.float32).astype(dtype)
            arrays[f"{part}/{name}"] = jax.device_put(values, NamedSharding(mesh, spec))
    for name, shape in COUNTERS.items():
        values = rng.integers(0, 1 << 30, shape, np.int32)
        arrays[f"counters/{name}"] = jax.device_put(values, NamedSharding(mesh, P()))
    return nested_arrays(arrays)


def _abstract(state: State, mesh: Mesh) -> State:
    """The same arrays on another mesh, each split along another dimension."""
    wanted = {}
    for name, array in arrays_by_name(state).items():
        spec = P(*reversed([*array.sharding.spec, *[None] * (array.ndim - len(array.sharding.spec))]))
        wanted[name] = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))
    return unflatten_like(state, wanted)


def _placed_as(array: jax.Array, place: jax.Array) -> jax.Array:
    return jax.device_put(array, place.sharding)


def _save(root: Path, run: str, step: int, state: State) -> Path:
    saver = Saver(root, Checkpoint(keep=2), SpaceNeeded(0, 0), Identity())
    describe = lambda arrays: Manifest(run, step, arrays, {}, step * 1000, {}, None, [])
    saver.save(step, state, describe)
    saved = saver.result(wait=True)
    assert saved is not None and saved.failure is None, saved
    return root / str(step)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=200, help="bits flipped, one a case, a quarter in small files")
    parser.add_argument("--truncations", type=int, default=50)
    parser.add_argument("--deletions", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the table between the file's markers")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
