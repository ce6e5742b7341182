"""Counts the communication of compiled programs that no work hides, without anything of jaxmnt.

    python benchmarks/plan.py --save FOLDER    compile, and write each program with the plan's report about it
    python benchmarks/exposed.py FOLDER        read the programs, and compare the figures with the plan's

It is a second opinion on the plan: it has its own parser of XLA's text, its own roofline and its own replay. It takes
the rates of the device, the devices of a host, and how often a pipeline's branches are taken, from the report.

- A product takes FLOPs / (rate · k / (k + 400)) or, if that is longer, the time of its bytes. Other work takes the time
  of its bytes.
- A collective takes 8.4 µs, 3.4 µs for each step of its ring within a host and 14 µs between hosts, and the time of its
  bytes on the slowest link. The devices of a group that share a host share the network cards of these devices.
- Collectives within hosts run one after another, and those between hosts as well. What a collective takes beyond the
  work between its start and its end is exposed.
"""

import argparse
import json
import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "s32": 4, "u32": 4, "s64": 8, "u64": 8, "s8": 1, "u8": 1}
SHAPE = re.compile(r"\b(pred|bf16|[fsu]\d+\w*)\[([\d,]*)\]")
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
FREE |= {"optimization-barrier", "copy-start", "copy-done", "async-update"}
KINDS = {"all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all"}
START, WITHIN_STEP, BETWEEN_STEP = 8.4e-6, 3.4e-6, 14e-6
SCOPES = {"stage_forward": "layers", "stage_backward": "layers", "loss": "ends", "enter": "ends", "leave": "ends"}


def integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


class Line:
    """One instruction."""

    def __init__(self, name: str, text: str):
        opcode = re.search(r"(?:^|\s)([a-z][a-z0-9\-]*)\(", text)
        assert opcode is not None, text[:100]
        self.name, self.opcode = name, opcode.group(1)
        self.shapes = [(dtype, integers(sizes)) for dtype, sizes in SHAPE.findall(text[: opcode.start()])]
        rest = text[opcode.end() :]
        self.operands = re.findall(r"%([\w.\-]+)", rest[: rest.find(")")])
        self.rest = rest

    @property
    def bytes(self) -> int:
        return sum(BYTES.get(dtype, 1) * math.prod(sizes) for dtype, sizes in self.shapes)

    def called(self, key: str) -> str:
        match = re.search(rf"\b{key}=%?([\w.\-]+)", self.rest)
        return match.group(1) if match else ""

    def numbers(self, pattern: str) -> list[int]:
        match = re.search(pattern, self.rest)
        return integers(match.group(1)) if match else []

    @property
    def scope(self) -> str:
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match.group(1) if match else ""


def parse(text: str) -> tuple[str, dict[str, dict[str, Line]]]:
    """Returns the name of the entry, and the instructions of each computation by name, in order."""
    computations: dict[str, dict[str, Line]] = {}
    entry = name = ""
    for row in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", row):
            name = head.group(2)
            computations[name] = {}
            entry = name if head.group(1) else entry
        elif name and (line := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$", row)):
            computations[name][line.group(1)] = Line(line.group(1), line.group(2))
    return entry, computations


@dataclass
class Clocks:
    """Seconds at which the device and the links within and between hosts become free."""

    work: float = 0.0
    links: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def copy(self) -> "Clocks":
        return Clocks(self.work, list(self.links))


@dataclass
class Traffic:
    """All executions of the collectives of one kind and dtype."""

    times: float = 0.0
    sent: float = 0.0
    exposed: float = 0.0


class Reader:
    """Walks through a program in the order of its instructions."""

    def __init__(self, text: str, report: dict[str, Any]):
        self.entry, self.computations = parse(text)
        self.rates = report["timeline"]["rates"]
        self.devices = report["devices"]["count"]
        self.devices_per_host = self.devices // report["devices"]["hosts"]
        # By whether a tick is steady, and the part of a stage's work.
        self.shares = {(is_steady, part): 1.0 for is_steady in (True, False) for part in ("layers", "ends")}
        if schedule := report["schedule"]:
            ticks, chunks = schedule["ticks"], schedule["chunks"]
            # The steady ticks are an inner loop, whose scope says how many there are for each of the others.
            ratio = re.search(r"about_([\d.]+)_rounds\)*/while/body/steady", text)
            steady = ticks * float(ratio.group(1)) / (1 + float(ratio.group(1))) if ratio else 0.0
            self.shares[True, "ends"] = 1 / chunks
            self.shares[False, "layers"] = (schedule["microbatches"] * chunks - steady) / (ticks - steady)
            self.shares[False, "ends"] = self.shares[False, "layers"] / chunks
        self.traffic: dict[tuple[str, str], Traffic] = defaultdict(Traffic)
        self.seconds_of: dict[tuple[str, str], float] = {}
        self.conditions = 0.0

    def run(self, name: str, clocks: Clocks, times: float) -> Clocks:
        """Runs a computation that a step runs `times` times, and returns the clocks at its end."""
        clocks = clocks.copy()
        started: dict[str, tuple[float, Traffic]] = {}
        for line in self.computations[name].values():
            kind = line.opcode.removesuffix("-start")
            if line.opcode == "while":
                clocks = self.run_loop(line, clocks, times)
            elif line.opcode == "conditional":
                clocks = self.run_branches(line, clocks, times)
            elif line.opcode == "call":
                clocks = self.run(line.called("to_apply"), clocks, times)
            elif kind in KINDS:
                size, seconds, sent = self.collective(line, kind)
                if size == 1:
                    continue
                link = int(self.crosses_hosts(line, kind))
                total = self.traffic[kind, "between hosts" if link else "within hosts"]
                total.times += times
                total.sent += times * sent
                end = max(clocks.work, clocks.links[link]) + seconds
                clocks.links[link] = end
                if kind == line.opcode or '"is_sync":true' in line.rest:
                    total.exposed += times * (end - clocks.work)
                    clocks.work = end
                else:
                    started[line.name] = end, total
            elif line.opcode.endswith("-done"):
                if line.operands[0] in started:
                    end, total = started.pop(line.operands[0])
                    total.exposed += times * max(0.0, end - clocks.work)
                    clocks.work = max(clocks.work, end)
            else:
                clocks.work += self.work_seconds(name, line)
        return clocks

    def run_loop(self, line: Line, clocks: Clocks, times: float) -> Clocks:
        """Runs two iterations, and adds the second as often as there are more."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line.rest)
        mean = re.search(r"about_([\d.]+)_rounds\)*/while$", line.scope)
        count = float(known.group(1)) if known else float(mean.group(1)) if mean else 1.0
        if not known:
            self.conditions += times * (1 + count)
        if count < 1:
            return clocks
        first = self.run(line.called("body"), clocks, times)
        if count == 1:
            return first
        second = self.run(line.called("body"), first, times * (count - 1))
        work = first.work + (count - 1) * (second.work - first.work)
        links = [
            old if new == old else work - (second.work - new)
            for old, new in zip(first.links, second.links, strict=True)
        ]
        return Clocks(work, links)

    def run_branches(self, line: Line, clocks: Clocks, times: float) -> Clocks:
        """Runs the branch with work in its share of the executions, and the other one in the rest."""
        self.conditions += times
        names = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line.rest)
        if listed := re.search(r"branch_computations=\{([^}]*)\}", line.rest):
            names = re.findall(r"%?([\w.\-]+)", listed.group(1))
        busiest = max(names, key=lambda name: len(self.computations[name]))
        share = self.share(busiest)
        ends = []
        for name in names:
            part = share if name == busiest else (1 - share) / max(1, len(names) - 1)
            ends.append((part, self.run(name, clocks, times * part) if part else clocks))
        links = [sum(part * end.links[link] for part, end in ends) for link in range(2)]
        return Clocks(sum(part * end.work for part, end in ends), links)

    def share(self, name: str) -> float:
        """Returns the share of executions in which a branch is taken, judged by the scopes in it."""
        for line in self.computations[name].values():
            parts = line.scope.split("/")
            for scope, group in SCOPES.items():
                if scope in parts:
                    return self.shares["steady" in parts, group]
        return 1.0

    def groups(self, line: Line, kind: str) -> list[list[int]]:
        if kind == "collective-permute":
            pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line.rest)
            assert pairs is not None
            return [integers(pair) for pair in pairs.group(1).split("},{")]
        text = line.rest.partition("replica_groups=")[2]
        if text.startswith("{{"):
            return [integers(group) for group in text[: text.index("}}")].split("},{")]
        if text.startswith("mesh["):
            return mesh_groups(text, self.devices)
        counts = re.match(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
        assert counts is not None, text[:80]
        number, size = int(counts.group(1)), int(counts.group(2))
        dims = integers(counts.group(3))
        order = integers(counts.group(4)) if counts.group(4) else list(range(len(dims)))
        ids = permuted(dims, order)
        return [ids[start : start + size] for start in range(0, number * size, size)]

    def crosses_hosts(self, line: Line, kind: str) -> bool:
        return any(len({device // self.devices_per_host for device in group}) > 1 for group in self.groups(line, kind))

    def collective(self, line: Line, kind: str) -> tuple[int, float, float]:
        """Returns the size of the groups, the seconds, and the bytes that a device sends."""
        groups = self.groups(line, kind)
        size = max(map(len, groups))
        # The shape of a start is (inputs, outputs, …). A gather's whole array is its larger side, as a scatter's is.
        sizes = [
            BYTES.get(dtype, 1) * math.prod(shape) for dtype, shape in line.shapes if (dtype, shape) != ("u32", [])
        ]
        total = sum(sizes)
        is_started = line.opcode.endswith("-start")
        if kind in ("all-gather", "reduce-scatter"):
            whole = total * size / (size + 1) if is_started else total * (size if kind == "reduce-scatter" else 1)
        else:
            whole = total / 2 if is_started and (kind != "all-reduce" or line_has_operands(line)) else total
        if kind == "collective-permute":
            between = self.crosses_hosts(line, kind)
            rate = self.rates["between_hosts" if between else "within_host"]
            return 2, START + (BETWEEN_STEP if between else WITHIN_STEP) + whole / rate, whole
        passes = 2 if kind == "all-reduce" else 1
        seconds = 0.0
        for group in groups:
            of_host = Counter(device // self.devices_per_host for device in group)
            hosts, cards = len(of_host), min(of_host.values())
            inside = passes * whole * (size - 1) / size / self.rates["within_host"] if size > hosts else 0.0
            outside = passes * whole * (1 - 1 / hosts) / (cards * self.rates["between_hosts"])
            steps = passes * ((size - hosts) * WITHIN_STEP + (hosts - 1) * BETWEEN_STEP)
            seconds = max(seconds, START + steps + max(inside, outside))
        return size, seconds, passes * whole * (size - 1) / size

    def work_seconds(self, computation: str, line: Line) -> float:
        key = computation, line.name
        if key not in self.seconds_of:
            self.seconds_of[key] = self.roofline(computation, line)
        return self.seconds_of[key]

    def roofline(self, computation: str, line: Line) -> float:
        if line.opcode in FREE:
            return 0.0
        lines = self.computations[computation]
        if line.opcode == "fusion":
            inner = self.computations[line.called("calls")]
            product = sum(self.product_seconds(inner, nested) for nested in inner.values())
            moved = fusion_bytes(inner)
        else:
            product = self.product_seconds(lines, line)
            moved = line.bytes + sum(lines[name].bytes for name in line.operands if name in lines)
            if line.opcode in ("dynamic-slice", "gather"):
                moved = 2 * line.bytes
            if line.opcode == "dynamic-update-slice":
                moved = 2 * lines[line.operands[1]].bytes
        return max(product, moved / self.rates["memory"])

    def product_seconds(self, lines: dict[str, Line], line: Line) -> float:
        """Returns the seconds of a product or of attention, or 0."""
        target = re.search(r'custom_call_target="([^"]*)"', line.rest) if line.opcode == "custom-call" else None
        name = target.group(1) if target else ""
        if name.startswith("__cudnn$fmha"):
            _, heads, queries, keys = line.numbers(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]')[:4]
            width = lines[line.operands[0]].shapes[0][1][-1]
            is_backward = "Backward" in name
            pairs = queries * keys / (2 if 'CAUSAL"' in line.rest else 1)
            batch = line.numbers(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]')[0]
            flops = 2 * batch * heads * pairs * width * (5 if is_backward else 2)
            return flops / (self.rates["attention"] * (0.85 if is_backward else 1)) * (1 + 500 / queries)
        if line.opcode != "dot" and not name.startswith("__cublas"):
            return 0.0
        dtype, shape = lines[line.operands[0]].shapes[0]
        contracted = line.numbers(r'lhs_contracting_dim(?:s|ensions"?)[=:]\s*[\[{]([^\]}]*)')
        depth = math.prod(shape[dimension] for dimension in contracted)
        names = {"bf16": "bfloat16", "f16": "bfloat16"}
        rate = self.rates["products"]["float8" if dtype.startswith("f8") else names.get(dtype, "float32")]
        return 2 * math.prod(line.shapes[0][1]) * depth / (rate * depth / (depth + 400)) if depth else 0.0


def permuted(dims: list[int], order: list[int]) -> list[int]:
    """Returns the numbers 0, 1, … in an array of these dimensions, whose axes are then transposed to `order`."""
    strides = [math.prod(dims[axis + 1 :]) for axis in range(len(dims))]
    ids = [0]
    for axis in order:
        ids = [number + index * strides[axis] for number in ids for index in range(dims[axis])]
    return ids


def mesh_groups(text: str, devices: int) -> list[list[int]]:
    """Returns the groups that text like mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'} names."""
    match = re.match(r"mesh\[([^\]]*)\](?:,? ?device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}", text)
    assert match is not None, text[:80]
    axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match.group(1))}
    dims = integers(match.group(2) or "") or [devices]
    ids = permuted(dims, integers(match.group(3) or "") or list(range(len(dims))))
    differing = re.findall(r"'(\w+)'", match.group(4))
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for position, device in enumerate(ids):
        rest, key = position, []
        for name in reversed(axes):
            rest, index = divmod(rest, axes[name])
            key += [] if name in differing else [index]
        groups[tuple(key)].append(device)
    return list(groups.values())


def line_has_operands(line: Line) -> bool:
    """Returns True if the type of a started all-reduce is ((operands), results)."""
    return len(line.shapes) == 2 * len(line.operands)


def fusion_bytes(lines: dict[str, Line]) -> float:
    """Returns the bytes that a fusion reads and writes. Of an array that it only slices, the slice counts."""
    users = defaultdict(list)
    for line in lines.values():
        for position, name in enumerate(line.operands):
            users[name].append((line, position))

    def read(name: str) -> float:
        total = 0.0
        for user, position in users[name]:
            if user.opcode == "bitcast":
                total += read(user.name)
            elif position == 0 and user.opcode in ("dynamic-slice", "gather"):
                total += user.bytes
            elif position != 0 or user.opcode != "dynamic-update-slice":
                return lines[name].bytes
        return min(total, lines[name].bytes)

    def written(line: Line) -> float:
        if line.opcode == "tuple":
            return sum(written(lines[name]) for name in line.operands)
        if line.opcode == "bitcast":
            return written(lines[line.operands[0]])
        return lines[line.operands[1]].bytes if line.opcode == "dynamic-update-slice" else line.bytes

    *_, root = lines.values()
    return sum(read(line.name) for line in lines.values() if line.opcode == "parameter") + written(root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder that benchmarks/plan.py --save has written")
    options = parser.parse_args()
    for path in sorted(options.folder.glob("*.hlo")):
        report = json.loads(path.with_suffix(".json").read_text())
        reader = Reader(path.read_text(), report)
        end = reader.run(reader.entry, Clocks(), 1.0)
        exposed = sum(total.exposed for total in reader.traffic.values())
        plan = report["timeline"]
        print(
            f"{path.stem}: step {end.work:.3f} s, exposed {exposed:.3f} s ({100 * exposed / end.work:.1f} %), "
            f"conditions {reader.conditions:.0f}; the plan has {plan['step_seconds']:.3f} s, "
            f"{plan['exposed_seconds']:.3f} s ({plan['exposed_percent']:.1f} %), {plan['conditions']:.0f}; "
            f"exposed / plan {exposed / max(plan['exposed_seconds'], 1e-9):.3f}"
        )
        for (kind, place), total in sorted(reader.traffic.items(), key=lambda entry: -entry[1].exposed):
            print(
                f"    {kind:18} {place:13} {total.times:9.0f} times, sent {total.sent / 2**30:8.1f} GiB, "
                f"exposed {total.exposed:.3f} s"
            )


if __name__ == "__main__":
    main()
