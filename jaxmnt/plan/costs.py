"""Estimates how long the instructions of a compiled program take at given rates, by a roofline model.

An instruction that multiplies takes the time of its FLOPs at the rate for its shape or, if that is longer, the time of
its bytes. Any other instruction takes the time of its bytes. The overhead of an instruction is added if it was
measured. Work that runs at the same time as communication is slower, but this is not included.
"""

import math
import re
from collections.abc import Iterator

from jaxmnt.models.mosaic import BLOCK_ROWS
from jaxmnt.plan.hlo import Array, Instruction, Program
from jaxmnt.plan.rates import Rates

_FREE_OPCODES = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "optimization-barrier", "copy-start", "copy-done", "async-update", "async-done",
}  # fmt: skip
"""Opcodes of instructions that take no time."""
_DTYPE_NAMES = {"bf16": "bfloat16", "f16": "bfloat16", "f32": "float32", "f64": "float32"}
"""Dtypes whose rates are used, by XLA's names of the dtypes."""


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
        """Returns (seconds, FLOPs) of an instruction. Only matrix products and attention have FLOPs."""
        key = (computation, instruction.name)
        if key not in self._cache:
            self._cache[key] = self._compute_cost(computation, instruction)
        return self._cache[key]

    def _compute_cost(self, computation: str, instruction: Instruction) -> tuple[float, float]:
        """Returns what `cost` caches."""
        if instruction.opcode in _FREE_OPCODES:
            return 0.0, 0.0
        products = list(self._product_costs(computation, instruction))
        product_seconds = sum(seconds for _, seconds in products)
        seconds = max(product_seconds, self.bytes_moved(computation, instruction) / self._rates.memory)
        return seconds + self._rates.instruction, sum(flops for flops, _ in products)

    def _product_costs(self, computation: str, instruction: Instruction) -> Iterator[tuple[float, float]]:
        """Yields (FLOPs, seconds) of each matrix product and attention call in an instruction."""
        if instruction.opcode == "fusion":
            assert instruction.callee is not None
            for nested in self._program.computations[instruction.callee]:
                yield from self._product_costs(instruction.callee, nested)
        elif instruction.opcode == "dot":
            yield self._product_cost(computation, instruction, r"lhs_{}_dims=\{{([\d,]*)\}}")
        elif instruction.opcode == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', instruction.line)
            name = target.group(1) if target else ""
            if name.startswith("__cublas"):
                yield self._product_cost(computation, instruction, r'"lhs_{}_dimensions":\s*\[([^\]]*)\]')
            elif name.startswith("__cudnn$fmha"):
                yield self._attention_cost(computation, instruction, backward="Backward" in name)
            elif name.startswith("mosaic_gpu"):
                yield self._grouped_cost(computation, instruction)

    def _product_cost(self, computation: str, instruction: Instruction, dimensions: str) -> tuple[float, float]:
        """Returns (FLOPs, seconds) of a matrix product. `dimensions` is a pattern with a placeholder for
        `contracting` or `batch`. It captures the numbers of these dimensions of the left operand."""
        dtype, shape = self._operand_array(computation, instruction.operands[0])
        contracting = _dimension_numbers(dimensions.format("contracting"), instruction.line)
        batch = _dimension_numbers(dimensions.format("batch"), instruction.line)
        depth = math.prod(shape[dimension] for dimension in contracting)
        batch_size = math.prod(shape[dimension] for dimension in batch)
        rows = math.prod(shape) / (depth * batch_size)
        outputs = math.prod(instruction.arrays[0][1])
        if not outputs:
            return 0.0, 0.0
        # A weight's gradient contracts over the rows, which are the first dimension after the batch dimensions.
        sums_over_rows = min(contracting, default=0) == len(batch) < len(shape) - 1
        name = "float8" if dtype.startswith("f8") else _DTYPE_NAMES.get(dtype, "float32")
        seconds = self._rates.product_seconds(
            rows, outputs / (rows * batch_size), depth, name, batch=batch_size, gradient=sums_over_rows
        )
        return 2.0 * outputs * depth, seconds

    def _grouped_cost(self, computation: str, instruction: Instruction) -> tuple[float, float]:
        """Returns (FLOPs, seconds) of a grouped product by a Mosaic kernel. The last two operands are rows and weights,
        or rows and the gradients of rows. All rows count, although some of a weight gradient's may not be used. The
        kernel for rows multiplies one block more for each expert but one."""
        (dtype, (rows, inputs)), (_, other) = (
            self._operand_array(computation, name) for name in instruction.operands[-2:]
        )
        outputs = instruction.arrays[0][1]
        if is_gradient := len(other) == 2:
            experts, *_, columns = outputs
            m, n, k, batch = inputs, columns, rows / experts, experts
        else:
            m, n, k, batch = rows + (other[0] - 1) * BLOCK_ROWS, outputs[-1], inputs, 1
        seconds = self._rates.product_seconds(m, n, k, _DTYPE_NAMES[dtype], batch=batch, gradient=is_gradient)
        return 2.0 * batch * m * n * k, seconds

    def _attention_cost(self, computation: str, instruction: Instruction, *, backward: bool) -> tuple[float, float]:
        """Returns (FLOPs, seconds) of a call of cuDNN's fused attention."""
        _, query_shape = self._operand_array(computation, instruction.operands[0])
        flops, length = _attention_flops(instruction.line, query_shape[-1], backward=backward)
        return flops, self._rates.attention_seconds(flops, length, backward=backward)

    def _operand_array(self, computation: str, name: str) -> Array:
        """Returns the first array that the instruction `name` of a computation returns."""
        return self._by_name[computation][name].arrays[0]

    def bytes_moved(self, computation: str, instruction: Instruction) -> float:
        """Returns the number of bytes that an instruction reads and writes. If it slices an operand, only the slice
        counts."""
        by_name = self._by_name[computation]
        if instruction.opcode == "fusion" and instruction.callee is not None:
            return self._bytes_moved_by_fusion(instruction.callee)
        if instruction.opcode in ("dynamic-slice", "gather"):
            return 2.0 * instruction.bytes
        if instruction.opcode == "dynamic-update-slice":
            return 2.0 * by_name[instruction.operands[1]].bytes
        operand_bytes = sum(by_name[name].bytes for name in instruction.operands if name in by_name)
        return float(operand_bytes + instruction.bytes)

    def _bytes_moved_by_fusion(self, computation: str) -> float:
        """Returns the number of bytes that a fusion reads and writes. `computation` is the one that the fusion
        calls."""
        instructions = self._program.computations[computation]
        by_name = self._by_name[computation]
        users: dict[str, list[tuple[Instruction, int]]] = {}
        for instruction in instructions:
            for position, name in enumerate(instruction.operands):
                users.setdefault(name, []).append((instruction, position))

        def bytes_read(operand: Instruction) -> int:
            """Returns the bytes that users read of an operand. Slices read a part, in-place updates nothing, others
            all."""
            total = 0
            for user, position in users.get(operand.name, []):
                if user.opcode == "bitcast":
                    total += bytes_read(user)
                elif position == 0 and user.opcode in ("dynamic-slice", "gather"):
                    total += user.bytes
                elif position != 0 or user.opcode != "dynamic-update-slice":
                    return operand.bytes
            return min(total, operand.bytes)

        def bytes_written(result: Instruction) -> int:
            """Returns the bytes that are written for a result. An in-place update writes only its slice."""
            if result.opcode == "tuple":
                return sum(bytes_written(by_name[name]) for name in result.operands)
            if result.opcode == "bitcast":
                return bytes_written(by_name[result.operands[0]])
            if result.opcode == "dynamic-update-slice":
                return by_name[result.operands[1]].bytes
            return result.bytes

        parameters = (instruction for instruction in instructions if instruction.opcode == "parameter")
        root = next(instruction for instruction in reversed(instructions) if instruction.is_root)
        return float(sum(map(bytes_read, parameters)) + bytes_written(root))


def _dimension_numbers(pattern: str, line: str) -> list[int]:
    """Returns the dimension numbers that a pattern captures in a line, or none if it does not match."""
    match = re.search(pattern, line)
    return [int(number) for number in re.findall(r"\d+", match.group(1))] if match else []


def _attention_flops(line: str, width: int, *, backward: bool) -> tuple[float, int]:
    """Returns (FLOPs, row length) of cuDNN's fused attention. It has two products of queries with keys or values in
    the forward pass and five in the backward pass, and only pairs that the mask leaves count."""
    shape = re.search(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]', line)
    assert shape is not None, "a call of cuDNN's attention has the shape of its scores"
    batch, heads, queries, keys = (int(size) for size in re.findall(r"\d+", shape.group(1)))
    window = re.search(r'"sliding_window_length":\s*"?(\d+)', line)
    window_size = int(window.group(1)) if window else 0
    pairs = float(queries * keys)
    if 'CAUSAL"' in line:
        pairs /= 2
    if 0 < window_size < keys:
        pairs = min(pairs, float(queries * window_size))
    return 2.0 * batch * heads * pairs * width * (5 if backward else 2), queries
