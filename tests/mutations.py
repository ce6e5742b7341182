"""Damages files and lines in every way that a disk, a crash, a careless hand or a stranger damages them.

A mutation is drawn from a `random.Random`, so that the same seed gives the same damage on any machine. Its kind says
what is done: to the bytes, to lines, to the tree of a JSON or YAML document, to the header of a NumPy array, or to
the file itself, which may become a directory, a link that leads nowhere or a pipe.
"""

import contextlib
import copy
import io
import json
import os
import random
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

MEBIBYTE = 2**20
_DEEP = 100_000


@dataclass(frozen=True)
class Mutation:
    """What is done to one file."""

    kind: str
    detail: str
    content: bytes | None = None
    """What the file holds afterwards; None if it is no regular file any more."""
    replace: Callable[[Path], None] | None = None

    def apply(self, path: Path) -> None:
        if self.content is not None:
            path.write_bytes(self.content)
            return
        assert self.replace is not None
        if not path.is_dir():
            path.unlink()
        self.replace(path)

    def __str__(self) -> str:
        return f"{self.kind} ({self.detail})" if self.detail else self.kind


Bytes = Callable[[random.Random, bytes], tuple[bytes, str]]
Reseal = Callable[[bytes], bytes]
"""Puts right what seals the content of a file, as one would who knows how it is made."""


def kinds(form: str, *, on_disk: bool = True, resealed: bool = False) -> list[str]:
    """The kinds of damage that a file of this form can take, or a folder."""
    if form == "folder":
        return [*_STRAYS, *_MOVED]
    found = list(_BYTES)
    if form in ("lines", "text"):
        found += _LINES
    if form in ("json", "lines", "yaml"):
        found += _TREE
        found += [f"resealed: {kind}" for kind in _TREE] if resealed else []
    found += {"yaml": list(_YAML), "npy": list(_NPY), "lines": []}.get(form, [])
    return found + (list(_FILE) if on_disk else [])


def mutate(form: str, kind: str, rng: random.Random, raw: bytes, reseal: Reseal | None = None) -> Mutation:
    """One mutation of this kind of a file that holds `raw`."""
    if kind in _FILE:
        return Mutation(kind, "", replace=_FILE[kind])
    if kind in _MOVED:
        return Mutation(kind, "", replace=_MOVED[kind])
    if kind in _STRAYS:
        stray = rng.choice(_NAMES)
        return Mutation(kind, f"{stray!r}", replace=lambda folder: _STRAYS[kind](folder, stray))
    name = kind.removeprefix("resealed: ")
    for table in (_BYTES, _LINES, _YAML, _NPY):
        if name in table:
            content, detail = table[name](rng, raw)
            return Mutation(kind, detail, content)
    content, detail = _in_tree(form, _TREE[name], rng, raw)
    if name != kind:
        assert reseal is not None
        with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError):  # no tree that has a seal
            content = reseal(content)
    return Mutation(kind, detail, content)


# Bytes.


def _flip(rng: random.Random, raw: bytes) -> tuple[bytes, str]:
    if not raw:
        return b"\x01", "bit 0 of byte 0 of nothing"
    at, bit = rng.randrange(len(raw)), rng.randrange(8)
    return raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :], f"bit {bit} of byte {at} of {len(raw)}"


def _replace_byte(rng: random.Random, raw: bytes) -> tuple[bytes, str]:
    at, byte = rng.randrange(len(raw) + 1), rng.randrange(256)
    return raw[:at] + bytes([byte]) + raw[at + 1 :], f"byte {at} becomes {byte:#04x}"


def _truncate(rng: random.Random, raw: bytes) -> tuple[bytes, str]:
    size = rng.randrange(len(raw) + 1)
    return raw[:size], f"{size} of {len(raw)} bytes are left"


def _nul_block(rng: random.Random, raw: bytes) -> tuple[bytes, str]:
    """As after the crash of a host, where pages were promised and not written."""
    at = rng.randrange(len(raw) + 1)
    size = rng.choice([1, 16, 512, 4096, len(raw) - at])
    return raw[:at] + bytes(size) + raw[at + size :], f"{size} NULs from byte {at} on"


def _insert(rng: random.Random, raw: bytes, what: bytes) -> tuple[bytes, str]:
    at = rng.randrange(len(raw) + 1)
    return raw[:at] + what + raw[at:], f"{what[:24]!r} at byte {at}"


def _garbage(rng: random.Random, raw: bytes) -> tuple[bytes, str]:
    return rng.randbytes(rng.choice([1, 40, 3000])), "random bytes instead"


def _nested(rng: random.Random, raw: bytes) -> tuple[bytes, str]:
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}"), (b"(", b")"), (b"-", b"")])
    depth = rng.choice([1500, _DEEP])
    whole = rng.random() < 0.5
    return opening * depth + (b"0" + closing * depth if whole else b""), f"{opening!r} × {depth}"


_NOT_UTF8 = [b"\xff\xfe", b"\xc3", b"\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80"]
_ESCAPES = [b"\x1b[2J", b"\x07\x08", b"\r", b"\xc2\x9b31m", b"\xe2\x80\xae"]

_BYTES: dict[str, Bytes] = {
    "bit flipped": _flip,
    "byte replaced": _replace_byte,
    "truncated": _truncate,
    "empty": lambda rng, raw: (b"", ""),
    "block of NULs": _nul_block,
    "NULs at the end": lambda rng, raw: (raw + bytes(rng.choice([1, 4096])), ""),
    "random bytes": _garbage,
    "no UTF-8": lambda rng, raw: _insert(rng, raw, rng.choice(_NOT_UTF8)),
    "escapes": lambda rng, raw: _insert(rng, raw, rng.choice(_ESCAPES)),
    "deep nesting": _nested,
    "byte order mark": lambda rng, raw: (b"\xef\xbb\xbf" + raw, ""),
    "long": lambda rng, raw: _insert(rng, raw, rng.choice([b"x", b"1", b" ", b"\n"]) * MEBIBYTE),
    "twice": lambda rng, raw: (raw + raw, ""),
}


# Lines.


def _lines(change: Callable[[random.Random, list[bytes]], str]) -> Bytes:
    def apply(rng: random.Random, raw: bytes) -> tuple[bytes, str]:
        lines = raw.splitlines(keepends=True) or [b"\n"]
        detail = change(rng, lines)
        return b"".join(lines), detail

    return apply


def _duplicate(rng: random.Random, lines: list[bytes]) -> str:
    at = rng.randrange(len(lines))
    lines.insert(rng.randrange(len(lines) + 1), lines[at])
    return f"line {at + 1}"


def _reorder(rng: random.Random, lines: list[bytes]) -> str:
    rng.shuffle(lines)
    return ""


def _glue(rng: random.Random, lines: list[bytes]) -> str:
    at = rng.randrange(len(lines))
    lines[at] = lines[at].rstrip(b"\n")
    return f"line {at + 1} and the next"


def _tear(rng: random.Random, lines: list[bytes]) -> str:
    """Half of a line, as of a writer that was killed, and others after it."""
    at = rng.randrange(len(lines))
    lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
    return f"line {at + 1}"


def _foreign(rng: random.Random, lines: list[bytes]) -> str:
    line = rng.choice([b"", b"null", b"1", b'"train"', b"[]", b"{}", b"[1, 2]", b"nan", b"// text", b'{"kind": 1}'])
    lines.insert(rng.randrange(len(lines) + 1), line + b"\n")
    return repr(line)


_LINES: dict[str, Bytes] = {
    "line twice": _lines(_duplicate),
    "lines in another order": _lines(_reorder),
    "lines glued": _lines(_glue),
    "line torn": _lines(_tear),
    "foreign line": _lines(_foreign),
}


# Trees.

Tree = Callable[[random.Random, Any, Any], tuple[Any, Any, str]]
"""(rng, key, value) → the key and the value that take their place. A key of None leaves both out."""


class Raw(str):
    """Text that stands in the document as it is."""


_RAW = "\ue000raw\ue000"
_ATOMS: list[Any] = [None, True, False, 0, -1, 1, 1.5, "", "x", [], {}, [None], {"x": 1}, [[]], [0, 1], 2**63, -(2**31)]
_NUMBERS: list[Any] = [
    Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("-0"), Raw("-0.0"), Raw("1e999"), Raw("-1e999"), 10**400,
    Raw("9" * 5000), 2**64, -(2**70), 1e308, Raw("1e-999"), 0.1, Raw("1E5"), 255, 10**18,
]  # fmt: skip
_TEXTS = [
    "", "²", "٣", "1٣", "\x1b[2J\x1b]0;x\x07", "a\nb", "a\u2028b", "\ud800", "\x00", "../../x", "/", "..", ".", " ",
    "%s{0}", "\u202eabc", "x" * MEBIBYTE, "\x9b31m", "-1", "1e3", "gs://", "//", "x" * 300,
]  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _another_type(rng: random.Random, key: Any, value: Any) -> tuple[Any, Any, str]:
    new = rng.choice([atom for atom in _ATOMS if type(atom) is not type(value)])
    return key, new, f"{key!r} becomes {new!r}"


def _number(rng: random.Random, key: Any, value: Any) -> tuple[Any, Any, str]:
    new = rng.choice(_NUMBERS)
    return key, new, f"{key!r} becomes {str(new)[:30]}"


def _text(rng: random.Random, key: Any, value: Any) -> tuple[Any, Any, str]:
    new = rng.choice(_TEXTS)
    return key, new, f"{key!r} becomes {new[:30]!r}"


def _near(rng: random.Random, key: Any, value: Any) -> tuple[Any, Any, str]:
    """Another value of the same type, as a slip or an older file would have."""
    if isinstance(value, bool) or value is None:
        return key, not value, f"{key!r} becomes {not value}"
    if _is_number(value):
        new = rng.choice([-value, value + 1, value - 1, value * 2, value + 0.5])
        return key, new, f"{key!r} becomes {new}"
    if isinstance(value, str) and value:
        at = rng.randrange(len(value))
        new = value[:at] + rng.choice("0f./²") + value[at + 1 :]
        return key, new, f"{key!r} becomes {new[:60]!r}"
    if isinstance(value, list) and value:
        new = value[:-1] if rng.random() < 0.5 else [*value, copy.deepcopy(value[0])]
        return key, new, f"{key!r} has {len(new)} members"
    return _another_type(rng, key, value)


def _nested_value(rng: random.Random, key: Any, value: Any) -> tuple[Any, Any, str]:
    depth = rng.choice([200, 1500, _DEEP])
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}")])
    return key, Raw(opening * depth + "0" + closing * depth), f"{key!r} becomes {opening} × {depth}"


def _removed(rng: random.Random, key: Any, value: Any) -> tuple[Any, Any, str]:
    return None, None, f"{key!r} is left out"


def _renamed(rng: random.Random, key: Any, value: Any) -> tuple[Any, Any, str]:
    new = rng.choice(["x", "²", f"{key}\n", f"{key}\x1b[2J", f" {key}", "__class__", "y" * 300, ""])
    return new, value, f"{key!r} becomes {new[:30]!r}"


def _swapped(rng: random.Random, key: Any, value: Any) -> tuple[Any, Any, str]:
    """What a value holds, wrapped once more or unwrapped."""
    new = value[0] if isinstance(value, list) and value else [value]
    return key, new, f"{key!r} is wrapped or unwrapped"


_TREE: dict[str, Tree] = {
    "another type": _another_type,
    "odd number": _number,
    "odd text": _text,
    "another value": _near,
    "nested value": _nested_value,
    "key removed": _removed,
    "key renamed": _renamed,
    "wrapped": _swapped,
    "foreign key": lambda rng, key, value: (key, value, ""),  # see _place
}


def _in_tree(form: str, change: Tree, rng: random.Random, raw: bytes) -> tuple[bytes, str]:
    if form == "lines":
        lines = raw.splitlines(keepends=True)
        at = rng.randrange(len(lines))
        line, detail = _in_tree("json", change, rng, lines[at])
        lines[at] = line.replace(b"\n", b"") + b"\n"
        return b"".join(lines), f"line {at + 1}, {detail}"
    tree = yaml.safe_load(raw) if form == "yaml" else json.loads(raw)
    holder = {"": tree}
    detail = _change(rng, holder, change)
    indent = 1 if form == "json" and raw.count(b"\n") > 1 else None
    return dumped(holder.get("", next(iter(holder.values()), None)), indent), detail


def _change(rng: random.Random, holder: Any, change: Tree) -> str:
    """Changes one place of a tree; those near its root are as likely as all below them."""
    path: list[Any] = []
    keys = lambda: list(holder if isinstance(holder, dict) else range(len(holder)))
    key = rng.choice(keys())
    while isinstance(holder[key], dict | list) and holder[key] and (not path or rng.random() < 0.65):
        path, holder = [*path, key], holder[key]
        key = rng.choice(keys())
    where = "/".join(map(str, path[1:]))
    if change is _TREE["foreign key"]:
        new = rng.choice(["x", "²", "a\nb", "__proto__", "\x1b[2J", "z" * MEBIBYTE])
        if isinstance(holder, dict):
            holder[new] = rng.choice(_ATOMS)
        else:
            holder.insert(rng.randrange(len(holder) + 1), rng.choice(_ATOMS))
        return f"{new[:20]!r} in /{where}"
    new_key, value, detail = change(rng, key, holder[key])
    if isinstance(holder, list):
        holder[key : key + 1] = [] if new_key is None else [value]
    elif new_key == key:
        holder[key] = value
    else:
        items = [(new_key, value) if name == key else (name, old) for name, old in holder.items()]
        holder.clear()
        holder.update((name, old) for name, old in items if name is not None)
    return f"/{where}: {detail}"


def dumped(tree: Any, indent: int | None = None) -> bytes:
    """A tree as JSON in which `Raw` text stands as it is."""
    raws: list[str] = []

    def marked(value: Any) -> Any:
        if isinstance(value, Raw):
            raws.append(value)
            return f"{_RAW}{len(raws) - 1}{_RAW}"
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**300:
            return marked(Raw("1" + "0" * 400))
        if isinstance(value, dict):
            return {key: marked(item) for key, item in value.items()}
        return [marked(item) for item in value] if isinstance(value, list) else value

    text = json.dumps(marked(tree), indent=indent, default=str)
    mark = json.dumps(_RAW)[1:-1]
    return re.sub(rf'"{re.escape(mark)}(\d+){re.escape(mark)}"', lambda found: raws[int(found[1])], text).encode()


# YAML.


def _yaml_value(text: str) -> Bytes:
    def apply(rng: random.Random, raw: bytes) -> tuple[bytes, str]:
        places = list(re.finditer(rb"(?m)^( *)([\w]+): (.*)$", raw))
        place = rng.choice(places)
        return raw[: place.start(3)] + text.encode() + raw[place.end(3) :], f"{place[2].decode()}: {text[:40]}"

    return apply


_BOMB_NAMES = "abcdefgh"
_BOMB_MEMBERS = ["x", *(f"*{name}" for name in _BOMB_NAMES)]
_BOMB_PARTS = (
    f"{name}: &{name} [{', '.join([member] * 9)}]" for name, member in zip(_BOMB_NAMES, _BOMB_MEMBERS, strict=False)
)
_BOMB = f"{{{', '.join(_BOMB_PARTS)}}}"

_YAML: dict[str, Bytes] = {
    "no such day": _yaml_value("2001-99-99"),
    "an alias of itself": _yaml_value("&a [*a]"),
    "aliases of aliases": _yaml_value(_BOMB),
    "a Python object": _yaml_value('!!python/object/apply:os.system ["true"]'),
    "an unknown alias": _yaml_value("*nowhere"),
    "a list as a key": _yaml_value("{[1]: 2}"),
    "base 60": _yaml_value("190:20:30"),
    "a set": _yaml_value("!!set {a, b}"),
    "binary": _yaml_value("!!binary x"),
    "a merge": _yaml_value("{<<: 1}"),
    "a tab": lambda rng, raw: _insert(rng, raw, b"\n\t"),
    "two documents": lambda rng, raw: (raw + b"---\n" + raw, ""),
}


# NumPy arrays.

_DTYPES = [
    "|O", "<f4", "<f8", ">i8", "<u1", "|i1", "<i4", "<u8", "|V8", "<U4", "<c16", "<M8[s]", "|b1", "x", "",
    [("a", "<i4")], "<i4" * 100,
]  # fmt: skip


def _header(rng: random.Random, raw: bytes) -> tuple[bytes, str]:
    array = np.load(io.BytesIO(raw))
    known = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
    key = rng.choice(list(known))
    n = array.shape[0]
    shapes = [(), (0,), (-1,), (2**62,), (10**12,), (n + 1,), (n - 1,), (1, n), (n, 1), (n, 0), "x", (1.5,), (n, 2**40)]
    value = {
        "descr": rng.choice(_DTYPES),
        "fortran_order": rng.choice([True, 1, "x", None]),
        "shape": rng.choice(shapes),
    }
    text = repr(known | {key: value[key]}).encode()
    return _npy(text) + raw[_header_end(raw) :], f"{key} is {str(value[key])[:40]}"


def _odd_header(rng: random.Random, raw: bytes) -> tuple[bytes, str]:
    text = rng.choice(
        [b"", b"{}", b"None", b"[]", b"(" * 5000, b"-" * 9000, b"__import__('os')", b"{'descr': '<i4'}", b"{" * 200,
         b"\xff", b"'" * 50, b"{'shape': (1,)}", b"[" * 99 + b"]" * 99, b"1e999", b"9" * 5000]
    )  # fmt: skip
    return _npy(text) + raw[_header_end(raw) :], f"the header is {text[:20]!r}"


def _header_size(rng: random.Random, raw: bytes) -> tuple[bytes, str]:
    size = rng.choice([0, 1, 65535, 32768])
    return raw[:8] + struct.pack("<H", size) + raw[10:], f"the header has {size} bytes"


def _values(rng: random.Random, raw: bytes) -> tuple[bytes, str]:
    array = np.load(io.BytesIO(raw)).copy()
    info = np.iinfo(array.dtype)
    flat = array.reshape(-1)
    if not len(flat):
        return raw, "nothing to change"
    values = [0, 1, info.max, info.min, info.max // 2, min(len(flat), info.max), 10**6 % info.max]
    at, value = rng.randrange(len(flat)), rng.choice(values)
    flat[at] = value
    return _saved(array), f"element {at} is {value}"


def _order(rng: random.Random, raw: bytes) -> tuple[bytes, str]:
    array = np.load(io.BytesIO(raw))
    changed = rng.choice([array[::-1], np.zeros_like(array), np.repeat(array[:1], len(array), 0), np.roll(array, 1, 0)])
    return _saved(changed), "in another order, or all the same"


def _npy(header: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n"


def _header_end(raw: bytes) -> int:
    return 10 + struct.unpack("<H", raw[8:10])[0]


def _saved(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.ascontiguousarray(array))
    return stream.getvalue()


_NPY: dict[str, Bytes] = {
    "another header": _header,
    "odd header": _odd_header,
    "header's size": _header_size,
    "odd element": _values,
    "another order": _order,
}


# Files.


def _unreadable(path: Path) -> None:
    """Reading it fails: for everybody, since tests may run as root, whom no mode keeps out."""
    path.symlink_to("/proc/self/mem") if Path("/proc/self/mem").exists() else os.mkfifo(path)


def _with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "kept").write_text("kept")


def _ring(path: Path) -> None:
    other = path.with_name(f".{path.name}.other")
    path.symlink_to(other.name)
    other.symlink_to(path.name)


_FILE: dict[str, Callable[[Path], None]] = {
    "missing": lambda path: None,
    "a directory": lambda path: path.mkdir(),
    "a directory with a file": _with_a_file,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "links in a ring": _ring,
    "a link to nothing": lambda path: path.symlink_to("nothing-here"),
    "a pipe": os.mkfifo,
    "unreadable": _unreadable,
}


# Folders of checkpoints: names that stand for no step, and steps that lie elsewhere.

_NAMES = [
    "²", "٣", "1٣", "...unfinished", "..unfinished", ".unfinished", "mine.unfinished", "mine", "-5", "+5", "5 ", "5\n",
    "05", "010", "1_0", "10.damaged", "10.damaged.2", "10.unfinished", "5.unfinished", "7", "7.unfinished",
    "٣.unfinished", "9" * 30, "0", "0.unfinished", "7.orbax-checkpoint-tmp-1", "mine.orbax-checkpoint-tmp-0",
    "\x1b[2J", "a\nb.unfinished", "\udcff", "\udcff.unfinished", "x" * 200, "1e3", "10 (copy)", "run.json", "10.5",
    "٣٣.damaged", "0x10", " ", "-", "~", "*.unfinished", "[0-9].unfinished",
]  # fmt: skip


def _stray_with_its_folder(folder: Path, name: str) -> None:
    """A file, and a folder under the name that the file may seem to be a note about."""
    (folder / name).write_text("being written\n")
    beside = folder / name.removesuffix(".unfinished")
    if name.endswith(".unfinished") and not beside.exists():
        _with_a_file(beside)


def _stray_link(folder: Path, name: str) -> None:
    """A link to a folder that is somebody's archive."""
    archive = next(path for path in folder.parents if path.name == "run").parent / "archive"
    _with_a_file(archive)
    _make_way(folder / name).symlink_to(archive)


def _make_way(path: Path) -> Path:
    """Names that are taken already are left to what has them."""
    return path if not os.path.lexists(path) else path.with_name(f"{path.name}.x")


_STRAYS: dict[str, Callable[[Path, str], None]] = {
    "a stray file": lambda folder, name: None if (folder / name).is_dir() else _stray_with_its_folder(folder, name),
    "a stray folder": lambda folder, name: _with_a_file(_make_way(folder / name)),
    "a stray link": _stray_link,
    "a stray link to nothing": lambda folder, name: _make_way(folder / name).symlink_to("nothing-here"),
    "a stray link to itself": lambda folder, name: _make_way(folder / name).symlink_to(name),
    "a stray link upwards": lambda folder, name: _make_way(folder / name).symlink_to(".."),
    "a stray pipe": lambda folder, name: os.mkfifo(_make_way(folder / name)),
}


def _moved_away(inside: str) -> Callable[[Path], None]:
    """Lies in an archive, with a link in its place."""

    def move(folder: Path) -> None:
        archive = folder.parents[1] / "archive"
        archive.mkdir()
        original = folder / inside if inside else folder
        original.rename(archive / original.name)
        original.symlink_to(archive / original.name)

    return move


_MOVED: dict[str, Callable[[Path], None]] = {
    "an older step in an archive": _moved_away("5"),
    "the newest step in an archive": _moved_away("10"),
    "a part of a step in an archive": _moved_away("5/params"),
    "a file of a step in an archive": _moved_away("5/jaxmnt.json"),
    "what was cut off in an archive": _moved_away("15"),
    "its note in an archive": _moved_away("15.unfinished"),
    "all in an archive": _moved_away(""),
    "a loop of links inside a step": lambda folder: (folder / "5" / "params" / "loop").symlink_to("../.."),
    "a loop of links inside the newest": lambda folder: (folder / "10" / "params" / "loop").symlink_to(".."),
    "a link to itself inside a step": lambda folder: (folder / "5" / "loop").symlink_to("loop"),
    "a pipe inside a step": lambda folder: os.mkfifo(folder / "5" / "pipe"),
    "an archive inside what was cut off": lambda folder: _stray_link(folder / "15" / "params", "archive"),
}
