"""What a compiled program sends between devices, read from its text. The only module that knows how XLA writes it."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}
_SHAPE = re.compile(r"\b(pred|bf16|f8\w+|[suf]\d+)\[([\d,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")


@dataclass(frozen=True)
class Collective:
    """One collective of the program, on one device."""

    kind: str
    dtype: str
    payload: int
    """Bytes of the whole that is gathered or reduced in a group; of what is sent, for a permute."""
    groups: tuple[tuple[int, ...], ...]
    """Devices that take part together; for a permute, pairs of source and target."""
    times: float
    """How often it is executed in a run of the program."""
    asynchronous: bool
    where: str
    """The name that the operation has in the source."""

    @property
    def sent(self) -> float:
        """Bytes that a device sends in one execution, by the algorithms that send least."""
        size = max(len(group) for group in self.groups)
        if self.kind == "collective-permute":
            return self.payload
        return self.payload * (size - 1) / size * (2 if self.kind == "all-reduce" else 1)


def shapes_in(text: str) -> set[tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of everything that the program holds."""
    return {(dtype, _dimensions(sizes)) for dtype, sizes in _SHAPE.findall(text)}


def collectives(text: str, devices: int, share: Callable[[str], float] = lambda where: 1.0) -> list[Collective]:
    """Every collective with how often it is executed.

    Loops count as often as XLA says they run. What lies under a condition counts `share(where)` of the times.
    """
    computations, entry = _computations(text)
    found: list[Collective] = []

    def walk(name: str, times: float, conditional: bool) -> None:
        for line in computations[name]:
            for callee, count, condition in _calls(line):
                if callee in computations:
                    walk(callee, times * count, conditional or condition)
            collective = _read(line, devices)
            if collective is not None and max(map(len, collective.groups)) > 1:
                assert not math.isnan(times), f"{name} sends in a loop whose length is not known"
                part = share(collective.where) if conditional else 1.0
                found.append(Collective(**{**vars(collective), "times": times * part}))

    walk(entry, 1.0, False)
    return found


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    entry = current = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header and not line.startswith(("HloModule", " ")):
            current = header.group(2)
            bodies[current] = []
            entry = current if header.group(1) else entry
        elif current and line.startswith(" "):
            bodies[current].append(line)
    assert entry, "a program has an entry"
    return bodies, entry


def _calls(line: str) -> Iterator[tuple[str, float, bool]]:
    """(computation, times, whether under a condition) that an instruction runs."""
    match = _INSTRUCTION.match(line)
    opcode = _opcode(match.group(2)) if match else None
    if opcode == "while":
        trip = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
        count = float(trip.group(1)) if trip else math.nan
        for callee in re.findall(r"body=%?([\w.\-]+)", line):
            yield callee, count, False
    elif opcode == "conditional":
        branches = re.search(r"branch_computations=\{([^}]*)\}", line)
        names = re.findall(r"%?([\w.\-]+)", branches.group(1)) if branches else []
        names += re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line)
        for callee in names:
            yield callee, 1.0, True
    elif opcode in ("call", "async-start"):
        for callee in re.findall(r"(?:to_apply|calls|called_computations=\{)=?%?([\w.\-]+)", line):
            yield callee, 1.0, False


def _opcode(right: str) -> str | None:
    """The operation of an instruction's right-hand side, which follows its type: a word before a parenthesis."""
    depth = 0
    for position, character in enumerate(right):
        if character == "(" and depth == 0 and (match := re.search(r"([a-z][\w\-]*)$", right[:position])):
            return match.group(1)
        depth += (character in "({[") - (character in ")}]")
    return None


def _read(line: str, devices: int) -> Collective | None:
    match = _INSTRUCTION.match(line)
    if not match or not any(kind in line for kind in KINDS):
        return None
    right = match.group(2)
    opcode = _opcode(right) or ""
    kind = opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    started = opcode.endswith("-start")
    shapes = _SHAPE.findall(right[: right.index(f"{opcode}(")])
    sizes = [_bytes(dtype, dims) for dtype, dims in shapes if (dtype, dims) != ("u32", "")]  # a permute's context
    total = sum(sizes)
    if kind == "collective-permute":
        groups = _pairs(line)
        payload = total // 2 if started else total
    else:
        groups = _groups(line, devices)
        size = max(len(group) for group in groups)
        payload = {
            # A started gather or scatter has the type (piece, whole), however many arrays are combined in it.
            ("all-gather", True): total * size // (size + 1),
            ("reduce-scatter", True): total * size // (size + 1),
            ("reduce-scatter", False): total * size,
            ("all-to-all", True): total // 2,
        }.get((kind, started), total)
    name = re.search(r'op_name="([^"]*)"', line)
    configuration = re.search(r'"is_sync":(true|false)', line)
    return Collective(
        kind=kind,
        dtype=shapes[0][0],
        payload=payload,
        groups=groups,
        times=1.0,
        asynchronous=started and (configuration is None or configuration.group(1) == "false"),
        where=name.group(1) if name else "",
    )


def _pairs(line: str) -> tuple[tuple[int, ...], ...]:
    match = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
    assert match, line
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)", match.group(1) + "}"))


def _groups(line: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """The replica groups in any of the ways in which XLA writes them."""
    text = line[line.index("replica_groups=") + len("replica_groups=") :]
    if text.startswith("{}"):
        return (tuple(range(devices)),)
    if text.startswith("{{"):
        inside = text[2 : text.index("}}")]
        return tuple(tuple(int(number) for number in group.split(",")) for group in inside.split("},{"))
    if text.startswith("mesh["):
        return _mesh_groups(text, devices)
    match = re.match(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    assert match, f"replica groups of a form that is not known: {text[:80]}"
    count, size, dims, order = match.groups()
    ids = np.arange(devices).reshape(_dimensions(dims))
    ids = ids.transpose(_dimensions(order)) if order else ids
    return tuple(tuple(int(number) for number in row) for row in ids.reshape(int(count), int(size)))


def _mesh_groups(text: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}: devices that differ in the axes in braces."""
    match = re.match(r"mesh\[([^\]]*)\](?:,? ?device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}", text)
    assert match, f"replica groups of a form that is not known: {text[:80]}"
    axes, dims, order, chosen = match.groups()
    names = re.findall(r"'([^']+)'=(\d+)", axes)
    ids = np.arange(devices)
    if dims:
        ids = ids.reshape(_dimensions(dims))
        ids = ids.transpose(_dimensions(order)) if order else ids
    ids = ids.reshape([int(size) for _, size in names])
    together = [index for index, (name, _) in enumerate(names) if name in re.findall(r"'([^']+)'", chosen)]
    apart = [index for index in range(len(names)) if index not in together]
    size = math.prod(ids.shape[index] for index in together)
    return tuple(tuple(int(number) for number in row) for row in ids.transpose(apart + together).reshape(-1, size))


def _dimensions(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _bytes(dtype: str, dims: str) -> int:
    bits = _BITS.get(dtype) or (8 if dtype.startswith("f8") else int(re.sub(r"\D", "", dtype)))
    return math.prod(_dimensions(dims)) * bits // 8
