"""How long the instructions of a compiled program take at given rates: a roofline.

What multiplies takes as long as its FLOPs need, or its bytes if they need longer; everything else as long as its bytes.
Not counted: what starting a kernel takes, and that work beside communication is slower.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from jaxmnt.plan.hlo import HOST_COPY, Array, Collective, Instruction, Program

_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "optimization-barrier", "copy-start", "copy-done", "async-update", "async-done",
}  # fmt: skip
_START, _STEP_WITHIN_HOST, _STEP_BETWEEN_HOSTS = 8.4e-6, 3.4e-6, 14e-6
"""Seconds, by which NCCL itself weighs a ring with its protocol for large messages (src/graph/tuning.cc: base latency,
NVLink, network)."""

_NAMES = {"bf16": "bfloat16", "f16": "bfloat16", "f32": "float32", "f64": "float32"}


@dataclass(frozen=True)
class Rates:
    """What a device attains. FLOP/s by the dtype that is multiplied, and bytes a second: of its memory, and sent to
    another device of its host, by its share of the host's network, or to its host's memory."""

    products: Mapping[str, float]
    attention: float
    memory: float
    within_host: float
    between_hosts: float
    to_host: float

    def collective(self, one: Collective, host_of: Callable[[int], int]) -> float:
        """Seconds of one execution, by rings: what starts them, each step from device to device, and the bytes.

        Devices of a group that share a host share what goes between hosts, as NCCL's rings do: of a whole that is
        gathered on h hosts, (h - 1) / h enter each host, by as many network cards as it has devices in the group.
        """
        if one.kind == HOST_COPY:
            return _START + one.payload / self.to_host
        if one.kind == "collective-permute":
            if any(host_of(a) != host_of(b) for a, b in one.groups):
                return _START + _STEP_BETWEEN_HOSTS + one.payload / self.between_hosts
            return _START + _STEP_WITHIN_HOST + one.payload / self.within_host
        return max(self._ring(one, group, host_of) for group in one.groups)

    def _ring(self, one: Collective, group: tuple[int, ...], host_of: Callable[[int], int]) -> float:
        shares = Counter(map(host_of, group))  # how many of its devices each host has
        rounds, hosts = 2 if one.kind == "all-reduce" else 1, len(shares)
        seconds = one.sent / self.within_host
        if hosts > 1:
            entering = rounds * one.payload * (1 - 1 / hosts)
            seconds = max(seconds, entering / (min(shares.values()) * self.between_hosts))
        steps = rounds * ((len(group) - hosts) * _STEP_WITHIN_HOST + (hosts - 1) * _STEP_BETWEEN_HOSTS)
        return _START + steps + seconds


class Costs:
    """Of the instructions of one program."""

    def __init__(self, program: Program, rates: Rates):
        self._program, self._rates = program, rates
        self._known: dict[tuple[str, str], tuple[float, float]] = {}
        self._named = {
            name: {one.name: one for one in instructions} for name, instructions in program.computations.items()
        }

    def of(self, computation: str, instruction: Instruction) -> tuple[float, float]:
        """(seconds, FLOPs of products and attention)."""
        key = (computation, instruction.name)
        if key not in self._known:
            self._known[key] = self._measured(computation, instruction)
        return self._known[key]

    def _measured(self, computation: str, instruction: Instruction) -> tuple[float, float]:
        if instruction.opcode in _FREE:
            return 0.0, 0.0
        work = list(self._products(computation, instruction))
        busy = sum(flops / rate for flops, rate in work)
        return max(busy, self._moved(computation, instruction) / self._rates.memory), sum(flops for flops, _ in work)

    def _products(self, computation: str, instruction: Instruction) -> Iterator[tuple[float, float]]:
        """(FLOPs, attained rate) of each product in an instruction."""
        if instruction.opcode == "fusion":
            assert instruction.callee is not None
            for inner in self._program.computations[instruction.callee]:
                yield from self._products(instruction.callee, inner)
        elif instruction.opcode == "dot":
            left = self._array(computation, instruction.operands[0])
            dimensions = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.line)
            yield self._product(instruction, left, dimensions.group(1) if dimensions else "")
        elif instruction.opcode == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', instruction.line)
            name = target.group(1) if target else ""
            if name.startswith("__cublas"):
                left = self._array(computation, instruction.operands[0])
                found = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', instruction.line)
                yield self._product(instruction, left, found.group(1).replace('"', "") if found else "")
            elif name.startswith("__cudnn$fmha"):
                width = self._array(computation, instruction.operands[0])[1][-1]
                yield _attention_flops(instruction.line, width, backward="Backward" in name), self._rates.attention

    def _product(self, instruction: Instruction, left: Array, contracting: str) -> tuple[float, float]:
        dtype, shape = left
        depth = math.prod(shape[int(place)] for place in contracting.split(",") if place.strip())
        name = "float8" if dtype.startswith("f8") else _NAMES.get(dtype, "float32")
        return 2.0 * math.prod(instruction.arrays[0][1]) * depth, self._rates.products[name]

    def _array(self, computation: str, name: str) -> Array:
        return self._named[computation][name].arrays[0]

    def _moved(self, computation: str, instruction: Instruction) -> float:
        """Bytes that an instruction reads and writes: of what it takes a slice of, the slice alone."""
        named = self._named[computation]
        if instruction.opcode == "fusion" and instruction.callee is not None:
            return self._moved_by_fusion(instruction.callee)
        if instruction.opcode in ("dynamic-slice", "gather"):
            return 2.0 * instruction.bytes
        if instruction.opcode == "dynamic-update-slice":
            return 2.0 * named[instruction.operands[1]].bytes
        read = sum(named[name].bytes for name in instruction.operands if name in named)
        return float(read + instruction.bytes)

    def _moved_by_fusion(self, computation: str) -> float:
        instructions, named = self._program.computations[computation], self._named[computation]
        users: dict[str, list[tuple[Instruction, int]]] = {}
        for instruction in instructions:
            for place, name in enumerate(instruction.operands):
                users.setdefault(name, []).append((instruction, place))

        def read(value: Instruction) -> int:
            total = 0
            for user, place in users.get(value.name, []):
                if user.opcode == "bitcast":
                    total += read(user)
                elif place == 0 and user.opcode in ("dynamic-slice", "gather"):
                    total += user.bytes
                elif place != 0 or user.opcode != "dynamic-update-slice":
                    return value.bytes
            return min(total, value.bytes)

        def written(value: Instruction) -> int:
            if value.opcode == "tuple":
                return sum(written(named[name]) for name in value.operands)
            if value.opcode == "bitcast":
                return written(named[value.operands[0]])
            if value.opcode == "dynamic-update-slice":
                return named[value.operands[1]].bytes
            return value.bytes

        parameters = (instruction for instruction in instructions if instruction.opcode == "parameter")
        root = next(one for one in reversed(instructions) if one.is_root)
        return float(sum(map(read, parameters)) + written(root))


def _attention_flops(line: str, width: int, *, backward: bool) -> float:
    """Of cuDNN's fused attention: two products of queries with keys or values forward, five backward, over the pairs
    that the mask leaves."""
    shape = re.search(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]', line)
    assert shape is not None, "cuDNN's attention says the shape of its scores"
    batch, heads, queries, keys = (int(size) for size in re.findall(r"\d+", shape.group(1)))
    window = re.search(r'"sliding_window_length":\s*"?(\d+)', line)
    reach = int(window.group(1)) if window else 0
    pairs = float(queries * keys)
    if 'CAUSAL"' in line:
        pairs /= 2
    if 0 < reach < keys:
        pairs = min(pairs, float(queries * reach))
    return 2.0 * batch * heads * pairs * width * (5 if backward else 2)
