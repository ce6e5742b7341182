"""Estimates how long the instructions of a compiled program take at given rates: a roofline model.

An instruction that multiplies takes the time of its FLOPs at the rate of its shape, or of its bytes if that is longer;
any other takes the time of its bytes. The overhead of an instruction counts if it was measured. The slowdown of work
that runs beside communication is not included.
"""

import math
import re
from collections.abc import Iterator

from jaxmnt.plan.hlo import Array, Instruction, Program
from jaxmnt.plan.rates import Rates

_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "optimization-barrier", "copy-start", "copy-done", "async-update", "async-done",
}  # fmt: skip
_DTYPE_NAMES = {"bf16": "bfloat16", "f16": "bfloat16", "f32": "float32", "f64": "float32"}


class Costs:
    """Computes and caches the costs of one program's instructions."""

    def __init__(self, program: Program, rates: Rates):
        self._program = program
        self._rates = rates
        self._cache: dict[tuple[str, str], tuple[float, float]] = {}
        self._by_name = {
            name: {instruction.name: instruction for instruction in instructions}
            for name, instructions in program.computations.items()
        }

    def cost(self, computation: str, instruction: Instruction) -> tuple[float, float]:
        """Returns (seconds, FLOPs of matrix products and attention) of an instruction."""
        key = (computation, instruction.name)
        if key not in self._cache:
            self._cache[key] = self._compute_cost(computation, instruction)
        return self._cache[key]

    def _compute_cost(self, computation: str, instruction: Instruction) -> tuple[float, float]:
        if instruction.opcode in _FREE:
            return 0.0, 0.0
        work = list(self._products(computation, instruction))
        busy = sum(seconds for _, seconds in work)
        seconds = max(busy, self.bytes_moved(computation, instruction) / self._rates.memory)
        return seconds + self._rates.instruction, sum(flops for flops, _ in work)

    def _products(self, computation: str, instruction: Instruction) -> Iterator[tuple[float, float]]:
        """Yields (FLOPs, seconds) of each matrix product and attention call in an instruction."""
        if instruction.opcode == "fusion":
            assert instruction.callee is not None
            for inner in self._program.computations[instruction.callee]:
                yield from self._products(instruction.callee, inner)
        elif instruction.opcode == "dot":
            yield self._product(computation, instruction, r"lhs_{}_dims=\{{([\d,]*)\}}")
        elif instruction.opcode == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', instruction.line)
            name = target.group(1) if target else ""
            if name.startswith("__cublas"):
                yield self._product(computation, instruction, r'"lhs_{}_dimensions":\s*\[([^\]]*)\]')
            elif name.startswith("__cudnn$fmha"):
                yield self._attention(computation, instruction, backward="Backward" in name)

    def _product(self, computation: str, instruction: Instruction, dimensions: str) -> tuple[float, float]:
        """Returns (FLOPs, seconds). `dimensions` is a pattern for the left operand's `contracting` or `batch`
        dimensions."""
        dtype, shape = self._array(computation, instruction.operands[0])
        contracting = _dimension_numbers(dimensions.format("contracting"), instruction.line)
        batch = _dimension_numbers(dimensions.format("batch"), instruction.line)
        depth = math.prod(shape[dimension] for dimension in contracting)
        times = math.prod(shape[dimension] for dimension in batch)
        rows = math.prod(shape) / (depth * times)
        outputs = math.prod(instruction.arrays[0][1])
        if not outputs:
            return 0.0, 0.0
        # A weight's gradient contracts over the rows, the first dimension after those of the batch.
        over_rows = min(contracting, default=0) == len(batch) < len(shape) - 1
        name = "float8" if dtype.startswith("f8") else _DTYPE_NAMES.get(dtype, "float32")
        seconds = self._rates.product(rows, outputs / (rows * times), depth, name, gradient=over_rows)
        return 2.0 * outputs * depth, times * seconds

    def _attention(self, computation: str, instruction: Instruction, *, backward: bool) -> tuple[float, float]:
        width = self._array(computation, instruction.operands[0])[1][-1]
        flops, length = _attention_flops(instruction.line, width, backward=backward)
        return flops, self._rates.attention_seconds(flops, length, backward=backward)

    def _array(self, computation: str, name: str) -> Array:
        return self._by_name[computation][name].arrays[0]

    def bytes_moved(self, computation: str, instruction: Instruction) -> float:
        """Returns the bytes that an instruction reads and writes. Of a sliced operand only the slice counts."""
        named = self._by_name[computation]
        if instruction.opcode == "fusion" and instruction.callee is not None:
            return self._bytes_moved_by_fusion(instruction.callee)
        if instruction.opcode in ("dynamic-slice", "gather"):
            return 2.0 * instruction.bytes
        if instruction.opcode == "dynamic-update-slice":
            return 2.0 * named[instruction.operands[1]].bytes
        read = sum(named[name].bytes for name in instruction.operands if name in named)
        return float(read + instruction.bytes)

    def _bytes_moved_by_fusion(self, computation: str) -> float:
        """Returns the bytes that a fusion reads and writes, given its computation."""
        instructions, named = self._program.computations[computation], self._by_name[computation]
        users: dict[str, list[tuple[Instruction, int]]] = {}
        for instruction in instructions:
            for position, name in enumerate(instruction.operands):
                users.setdefault(name, []).append((instruction, position))

        def read(value: Instruction) -> int:
            """Follows a parameter to its users: slices read a part, in-place updates nothing, all others the whole."""
            total = 0
            for user, position in users.get(value.name, []):
                if user.opcode == "bitcast":
                    total += read(user)
                elif position == 0 and user.opcode in ("dynamic-slice", "gather"):
                    total += user.bytes
                elif position != 0 or user.opcode != "dynamic-update-slice":
                    return value.bytes
            return min(total, value.bytes)

        def written(value: Instruction) -> int:
            """An in-place update writes only its slice."""
            if value.opcode == "tuple":
                return sum(written(named[name]) for name in value.operands)
            if value.opcode == "bitcast":
                return written(named[value.operands[0]])
            if value.opcode == "dynamic-update-slice":
                return named[value.operands[1]].bytes
            return value.bytes

        parameters = (instruction for instruction in instructions if instruction.opcode == "parameter")
        root = next(instruction for instruction in reversed(instructions) if instruction.is_root)
        return float(sum(map(read, parameters)) + written(root))


def _dimension_numbers(pattern: str, line: str) -> list[int]:
    """Returns the dimension numbers that a pattern captures."""
    match = re.search(pattern, line)
    return [int(number) for number in re.findall(r"\d+", match.group(1))] if match else []


def _attention_flops(line: str, width: int, *, backward: bool) -> tuple[float, int]:
    """Returns (FLOPs, row length) of cuDNN's fused attention: two products of queries with keys or values forward, five
    backward, over the pairs that the mask leaves."""
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
    return 2.0 * batch * heads * pairs * width * (5 if backward else 2), queries
