"""Parses the text of a compiled program into instructions, and finds out what they send between devices. This is the
only module that knows XLA's text format."""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

COLLECTIVE_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")

Array = tuple[str, tuple[int, ...]]
"""XLA's name of a dtype, and a shape."""

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}
_SHAPE = re.compile(r"\b(pred|bf16|f8\w+|[suf]\d+)\[([\d,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")


HOST_COPY = "host-copy"
"""Kind of a copy to or from host memory, treated as a collective without other devices."""

_HOST_SPACE = ":S(5)}"
"""Text that marks host memory in the layout of an array."""


@dataclass(frozen=True)
class Collective:
    """One collective of the program, on one device."""

    kind: str
    dtype: str
    payload: int
    """Size in bytes of the whole array that a group gathers or reduces, or of the array that a permute sends."""
    groups: tuple[tuple[int, ...], ...]
    """Groups of devices that communicate. For a permute they are pairs of source and target, and for a host copy
    empty."""
    asynchronous: bool
    """True if one instruction starts the collective, and a later one waits for it."""
    op_name: str
    """Name of the operation in the source."""

    @property
    def sent(self) -> float:
        """Number of bytes that a device sends in one execution by a bandwidth-optimal algorithm."""
        if self.kind in ("collective-permute", HOST_COPY):
            return self.payload
        size = max(len(group) for group in self.groups)
        return self.payload * (size - 1) / size * (2 if self.kind == "all-reduce" else 1)


def shapes_in(text: str) -> set[Array]:
    """Returns (dtype, shape) of every array in the text of a program."""
    return {(dtype, _dimensions(sizes)) for dtype, sizes in _SHAPE.findall(text)}


class Instruction(NamedTuple):
    """One line of a program."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    """The arrays that result: several if the instruction returns a tuple."""
    operands: tuple[str, ...]
    line: str

    @property
    def is_root(self) -> bool:
        """True if the result of this instruction is that of its computation."""
        return self.line.lstrip().startswith("ROOT ")

    @property
    def op_name(self) -> str:
        """Name of the operation in the source."""
        name = re.search(r'op_name="([^"]*)"', self.line)
        return name.group(1) if name else ""

    @property
    def bytes(self) -> int:
        """Size of the results in bytes."""
        return sum(bytes_of(array) for array in self.arrays)

    @property
    def callee(self) -> str | None:
        """Name of the computation of which the instruction consists, or which it runs once; None if there is none."""
        name = re.search(r"(?:calls|to_apply|called_computations)=\{?%?([\w.\-]+)", self.line)
        return name.group(1) if name else None

    @property
    def loop(self) -> tuple[str, float]:
        """The name of a loop's body, and its trip count. The count is the one that the compiler knows, otherwise the
        mean that the source has put into its scope `about_N_rounds`, otherwise NaN."""
        body = re.search(r"body=%?([\w.\-]+)", self.line)
        trip = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.line) or re.search(
            r"about_([\d.]+)_rounds\)*/while$", self.op_name
        )
        assert body is not None
        return body.group(1), float(trip.group(1)) if trip else math.nan

    @property
    def is_counted_loop(self) -> bool:
        """True for a loop whose trip count the compiler knows. On GPUs, the condition of any other loop is copied to
        the host before each iteration."""
        return '"known_trip_count"' in self.line

    @property
    def branches(self) -> list[str]:
        """Names of the computations from which a condition chooses."""
        branch_list = re.search(r"branch_computations=\{([^}]*)\}", self.line)
        names = re.findall(r"%?([\w.\-]+)", branch_list.group(1)) if branch_list else []
        return names + re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", self.line)


class Program:
    """The computations of a compiled program, each of which has its instructions in execution order."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = current = ""
        for line in text.splitlines():
            header = _HEADER.match(line)
            if header and not line.startswith(("HloModule", " ")):
                current = header.group(2)
                self.computations[current] = []
                self.entry = current if header.group(1) else self.entry
            elif current and line.startswith(" ") and (instruction := _parse_instruction(line)) is not None:
                self.computations[current].append(instruction)
        assert self.entry, "a program has an entry"


def _parse_instruction(line: str) -> Instruction | None:
    """Returns the instruction on a line; None if there is none."""
    match = _INSTRUCTION.match(line)
    opcode = _find_opcode(match.group(2)) if match else None
    if match is None or opcode is None:
        return None
    right_side = match.group(2)
    begin = right_side.index(f"{opcode}(")
    arrays = tuple((dtype, _dimensions(sizes)) for dtype, sizes in _SHAPE.findall(right_side[:begin]))
    after_opcode = right_side[begin + len(opcode) + 1 :]
    operands = tuple(re.findall(r"%([\w.\-]+)", after_opcode[: _closing_parenthesis(after_opcode)]))
    return Instruction(match.group(1), opcode, arrays, operands, line)


def _closing_parenthesis(text: str) -> int:
    """Returns the position of the parenthesis that closes the one before the text, or the length of the text."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position
    return len(text)


def _find_opcode(right_side: str) -> str | None:
    """Returns the opcode in the right-hand side of an instruction. It is the word between the type and a
    parenthesis."""
    depth = 0
    for position, character in enumerate(right_side):
        if character == "(" and depth == 0 and (match := re.search(r"([a-z][\w\-]*)$", right_side[:position])):
            return match.group(1)
        depth += (character in "({[") - (character in ")}]")
    return None


def collective_of(instruction: Instruction, devices: int) -> Collective | None:
    """Returns the collective of an instruction. Returns None if the instruction sends nothing, or only waits."""
    if instruction.opcode in ("fusion-start", "copy-start") and _HOST_SPACE in instruction.line:
        # A host array that is filled slice by slice sends only the slice, which is its smallest array.
        payload, dtype = min((bytes_of(array), array[0]) for array in instruction.arrays if array[1])
        return Collective(HOST_COPY, dtype, payload, (), True, instruction.op_name)
    kind = instruction.opcode.removesuffix("-start")
    if kind not in COLLECTIVE_KINDS:
        return None
    is_started, line = instruction.opcode.endswith("-start"), instruction.line
    # Scalars of type u32 are the context of a permute.
    result_bytes = sum(bytes_of(array) for array in instruction.arrays if array != ("u32", ()))
    if kind == "collective-permute":
        groups = _source_target_pairs(line)
        payload = result_bytes // 2 if is_started else result_bytes
    else:
        groups = _replica_groups(line, devices)
        size = max(len(group) for group in groups)
        payload = {
            # A gather or scatter that is started has the type (shard, whole), however many arrays it combines.
            ("all-gather", True): result_bytes * size // (size + 1),
            ("reduce-scatter", True): result_bytes * size // (size + 1),
            ("reduce-scatter", False): result_bytes * size,
            ("all-to-all", True): result_bytes // 2,
            # An all-reduce that is started has the type ((operands), results) in newer versions of XLA, and only the
            # results in older ones.
            ("all-reduce", True): result_bytes // 2 if "= ((" in line else result_bytes,
        }.get((kind, is_started), result_bytes)
    if max(map(len, groups)) == 1:
        return None
    sync_flag = re.search(r'"is_sync":(true|false)', line)
    return Collective(
        kind=kind,
        dtype=instruction.arrays[0][0],
        payload=payload,
        groups=groups,
        asynchronous=is_started and (sync_flag is None or sync_flag.group(1) == "false"),
        op_name=instruction.op_name,
    )


def _source_target_pairs(line: str) -> tuple[tuple[int, ...], ...]:
    """Returns the pairs of source and target of a permute."""
    match = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
    assert match, line
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)", match.group(1)))


def _replica_groups(line: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of devices of a collective, which may be in any of XLA's notations."""
    text = line[line.index("replica_groups=") + len("replica_groups=") :]
    if text.startswith("{}"):
        return (tuple(range(devices)),)
    if text.startswith("{{"):
        in_braces = text[2 : text.index("}}")]
        return tuple(tuple(int(number) for number in group.split(",")) for group in in_braces.split("},{"))
    if text.startswith("mesh["):
        return _mesh_groups(text, devices)
    match = re.match(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    assert match, f"replica groups in an unknown notation: {text[:80]}"
    count, size, dims, order = match.groups()
    return _tuples_of_rows(_devices_in_order(devices, dims, order).reshape(int(count), int(size)))


def _mesh_groups(text: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Parses groups like mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}. Braces have the axes along which a group's
    devices differ."""
    match = re.match(r"mesh\[([^\]]*)\](?:,? ?device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}", text)
    assert match, f"replica groups in an unknown notation: {text[:80]}"
    axes, dims, order, axes_text = match.groups()
    mesh_axes = re.findall(r"'([^']+)'=(\d+)", axes)
    ids = _devices_in_order(devices, dims, order).reshape([int(size) for _, size in mesh_axes])
    # Move the axes along which a group's devices differ to the end, so that each row is a group.
    group_axis_names = re.findall(r"'([^']+)'", axes_text)
    in_group_axes = [index for index, (name, _) in enumerate(mesh_axes) if name in group_axis_names]
    other_axes = [index for index in range(len(mesh_axes)) if index not in in_group_axes]
    size = math.prod(ids.shape[index] for index in in_group_axes)
    return _tuples_of_rows(ids.transpose(other_axes + in_group_axes).reshape(-1, size))


def _devices_in_order(devices: int, dims: str | None, order: str | None) -> np.ndarray:
    """Returns the device numbers as an array with dimensions `dims`, whose axes are then transposed to `order`."""
    ids = np.arange(devices)
    ids = ids.reshape(_dimensions(dims)) if dims else ids
    return ids.transpose(_dimensions(order)) if order else ids


def _tuples_of_rows(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, ids.tolist()))


def _dimensions(text: str) -> tuple[int, ...]:
    """Parses numbers that are separated by commas."""
    return tuple(int(number) for number in text.split(",") if number)


def bytes_of(array: Array) -> int:
    """Returns the size of an array in bytes."""
    dtype, dimensions = array
    bits = _BITS.get(dtype) or (8 if dtype.startswith("f8") else int(re.sub(r"\D", "", dtype)))
    return math.prod(dimensions) * bits // 8
