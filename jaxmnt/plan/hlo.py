"""Parses the text of a compiled program: its instructions, and what they send between devices. Only this module knows
XLA's text format."""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")

Array = tuple[str, tuple[int, ...]]
"""A dtype by XLA's name, and a shape."""

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}
_SHAPE = re.compile(r"\b(pred|bf16|f8\w+|[suf]\d+)\[([\d,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")


HOST_COPY = "host-copy"
"""Kind of a copy to or from host memory, treated as a collective without other devices."""

_HOST_SPACE = ":S(5)}"
"""The mark of host memory in a layout."""


@dataclass(frozen=True)
class Collective:
    """One collective of the program, on one device."""

    kind: str
    dtype: str
    payload: int
    """Bytes of the whole array that a group gathers or reduces; for a permute, bytes sent."""
    groups: tuple[tuple[int, ...], ...]
    """Groups of devices that take part together; pairs of source and target for a permute; empty for a host copy."""
    asynchronous: bool
    """True if it is started, and waited for later."""
    op_name: str
    """Name of the operation in the source."""

    @property
    def sent(self) -> float:
        """Bytes that a device sends in one execution, with bandwidth-optimal algorithms."""
        if self.kind in ("collective-permute", HOST_COPY):
            return self.payload
        size = max(len(group) for group in self.groups)
        return self.payload * (size - 1) / size * (2 if self.kind == "all-reduce" else 1)


def shapes_in(text: str) -> set[Array]:
    """Returns (dtype, shape) of every array in the program."""
    return {(dtype, _dimensions(sizes)) for dtype, sizes in _SHAPE.findall(text)}


class Instruction(NamedTuple):
    """One line of a program."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    """The results; several for a tuple."""
    operands: tuple[str, ...]
    line: str

    @property
    def is_root(self) -> bool:
        """True if this is the result of its computation."""
        return self.line.lstrip().startswith("ROOT ")

    @property
    def op_name(self) -> str:
        """Name of the operation in the source."""
        name = re.search(r'op_name="([^"]*)"', self.line)
        return name.group(1) if name else ""

    @property
    def bytes(self) -> int:
        return sum(bytes_of(array) for array in self.arrays)

    @property
    def callee(self) -> str | None:
        """The computation that it consists of, or runs once."""
        name = re.search(r"(?:calls|to_apply|called_computations)=\{?%?([\w.\-]+)", self.line)
        return name.group(1) if name else None

    @property
    def loop(self) -> tuple[str, float]:
        """The body of a loop and its trip count: as known to the compiler, else the mean from the source's scope
        `about_N_rounds`, else NaN."""
        body = re.search(r"body=%?([\w.\-]+)", self.line)
        trip = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.line) or re.search(
            r"about_([\d.]+)_rounds/while", self.op_name
        )
        assert body is not None
        return body.group(1), float(trip.group(1)) if trip else math.nan

    @property
    def branches(self) -> list[str]:
        """The computations that a condition chooses from."""
        several = re.search(r"branch_computations=\{([^}]*)\}", self.line)
        names = re.findall(r"%?([\w.\-]+)", several.group(1)) if several else []
        return names + re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", self.line)


class Program:
    """A compiled program's computations, each with its instructions in execution order."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = current = ""
        for line in text.splitlines():
            header = _HEADER.match(line)
            if header and not line.startswith(("HloModule", " ")):
                current = header.group(2)
                self.computations[current] = []
                self.entry = current if header.group(1) else self.entry
            elif current and line.startswith(" ") and (read := _instruction(line)) is not None:
                self.computations[current].append(read)
        assert self.entry, "a program has an entry"


def _instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    opcode = _opcode(match.group(2)) if match else None
    if match is None or opcode is None:
        return None
    right = match.group(2)
    begin = right.index(f"{opcode}(")
    arrays = tuple((dtype, _dimensions(sizes)) for dtype, sizes in _SHAPE.findall(right[:begin]))
    inside = right[begin + len(opcode) + 1 :]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside[: _closing_parenthesis(inside)]))
    return Instruction(match.group(1), opcode, arrays, operands, line)


def _closing_parenthesis(text: str) -> int:
    """Returns the position of the parenthesis that closes one opened before the text."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position
    return len(text)


def _opcode(right: str) -> str | None:
    """Returns the opcode of an instruction's right-hand side: the word after its type, before a parenthesis."""
    depth = 0
    for position, character in enumerate(right):
        if character == "(" and depth == 0 and (match := re.search(r"([a-z][\w\-]*)$", right[:position])):
            return match.group(1)
        depth += (character in "({[") - (character in ")}]")
    return None


def collective_of(instruction: Instruction, devices: int) -> Collective | None:
    """Returns the collective of an instruction; None if it sends nothing, or only waits for a started one."""
    if instruction.opcode in ("fusion-start", "copy-start") and _HOST_SPACE in instruction.line:
        # A host array that is filled slice by slice sends only the slice, which is its smallest array.
        payload, dtype = min((bytes_of(array), array[0]) for array in instruction.arrays if array[1])
        return Collective(HOST_COPY, dtype, payload, (), True, instruction.op_name)
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    is_started, line = instruction.opcode.endswith("-start"), instruction.line
    # Scalars of type u32 are the context of a permute.
    total = sum(bytes_of(array) for array in instruction.arrays if array != ("u32", ()))
    if kind == "collective-permute":
        groups = _source_target_pairs(line)
        payload = total // 2 if is_started else total
    else:
        groups = _replica_groups(line, devices)
        size = max(len(group) for group in groups)
        payload = {
            # A started gather or scatter has the type (shard, whole), however many arrays are combined in it.
            ("all-gather", True): total * size // (size + 1),
            ("reduce-scatter", True): total * size // (size + 1),
            ("reduce-scatter", False): total * size,
            ("all-to-all", True): total // 2,
            # Newer versions of XLA start a sum with the type ((operands), results), others with the results alone.
            ("all-reduce", True): total // 2 if "= ((" in line else total,
        }.get((kind, is_started), total)
    if max(map(len, groups)) == 1:
        return None
    configuration = re.search(r'"is_sync":(true|false)', line)
    return Collective(
        kind=kind,
        dtype=instruction.arrays[0][0],
        payload=payload,
        groups=groups,
        asynchronous=is_started and (configuration is None or configuration.group(1) == "false"),
        op_name=instruction.op_name,
    )


def _source_target_pairs(line: str) -> tuple[tuple[int, ...], ...]:
    match = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
    assert match, line
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)", match.group(1)))


def _replica_groups(line: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Returns the replica groups, in any of XLA's notations."""
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
    return _rows(_devices_in_order(devices, dims, order).reshape(int(count), int(size)))


def _mesh_groups(text: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Parses mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}: the devices of a group differ in the axes in braces."""
    match = re.match(r"mesh\[([^\]]*)\](?:,? ?device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}", text)
    assert match, f"replica groups of a form that is not known: {text[:80]}"
    axes, dims, order, group_axes = match.groups()
    names_and_sizes = re.findall(r"'([^']+)'=(\d+)", axes)
    ids = _devices_in_order(devices, dims, order).reshape([int(size) for _, size in names_and_sizes])
    # Move the axes along which a group's devices differ to the end: each row is then a group.
    in_group = re.findall(r"'([^']+)'", group_axes)
    together = [index for index, (name, _) in enumerate(names_and_sizes) if name in in_group]
    apart = [index for index in range(len(names_and_sizes)) if index not in together]
    size = math.prod(ids.shape[index] for index in together)
    return _rows(ids.transpose(apart + together).reshape(-1, size))


def _devices_in_order(devices: int, dims: str | None, order: str | None) -> np.ndarray:
    """Returns the device numbers as an array of dimensions `dims`, with its axes transposed to `order`."""
    ids = np.arange(devices)
    ids = ids.reshape(_dimensions(dims)) if dims else ids
    return ids.transpose(_dimensions(order)) if order else ids


def _rows(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, ids.tolist()))


def _dimensions(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def bytes_of(array: Array) -> int:
    dtype, dimensions = array
    bits = _BITS.get(dtype) or (8 if dtype.startswith("f8") else int(re.sub(r"\D", "", dtype)))
    return math.prod(dimensions) * bits // 8
