"""Pipeline schedules: tables of which stage computes what and when. Plain Python; `engine.py` executes the table.

The model's layers are cut into `stages · chunks` pieces; piece k is chunk k // stages of stage k % stages. A tick is
one iteration of the engine: a stage runs at most one forward and then at most one backward, and sends its results to
its neighbours, which receive them in the next tick. Ticks have no fixed length: a stage skips a phase in which it is
idle. With p stages, m microbatches and v chunks, all schedules below are idle for (p - 1) / (m · v) of the work
(interleaved: if p divides m; else the last group of microbatches leaves gaps). They differ in how many microbatches'
activations a stage stores:

gpipe        all forwards, then all backwards (Huang et al. 2018, arXiv:1811.06965): m
1f1b         each backward as early as possible (Narayanan et al. 2019, arXiv:1806.03377): 2 (p - stage) - 1
interleaved  1f1b with several chunks per stage (Narayanan et al. 2021, arXiv:2104.04473) and a smaller bubble:
             (v - 1) p + 2 (p - stage) - 1 chunks

With a separate program for each stage, 1f1b would store only p - stage microbatches. In one program for all stages
every exchange synchronises the neighbours, so more microbatches are in flight.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxmnt.models.contract import LayerGroup


class Work(NamedTuple):
    """A microbatch's pass through one chunk of a stage."""

    microbatch: int
    chunk: int


PhaseTable = tuple[tuple[Work | None, ...], ...]
"""The work in a phase, indexed [tick][stage]."""


@dataclass(frozen=True)
class PipelineSchedule:
    """The work of each stage in each tick. `backward` is empty for evaluation."""

    name: str
    stages: int
    chunks: int
    microbatches: int
    forward: PhaseTable
    backward: PhaseTable

    @property
    def ticks(self) -> int:
        return len(self.forward)

    def in_flight(self, stage: int) -> int:
        """Returns the most chunk inputs that a stage stores at a time."""
        stored, most = 0, 0
        for forward, backward in zip(self.forward, self.backward, strict=True):
            stored += forward[stage] is not None
            most = max(most, stored)
            stored -= backward[stage] is not None
        return most

    def slots(self) -> tuple[list[list[int]], list[list[int]], int]:
        """Assigns slots in which each stage stores residuals from each forward to its backward. Returns the slot of
        each forward and of each backward, [tick][stage] (0 where there is none), and the number of slots."""
        count = max(self.in_flight(stage) for stage in range(self.stages))
        writes = [[0] * self.stages for _ in range(self.ticks)]
        reads = [[0] * self.stages for _ in range(self.ticks)]
        for stage in range(self.stages):
            free, slot_of_work = list(range(count)), {}
            for tick in range(self.ticks):
                if (work := self.forward[tick][stage]) is not None:
                    writes[tick][stage] = slot_of_work[work] = free.pop(0)
                if (work := self.backward[tick][stage]) is not None:
                    reads[tick][stage] = slot_of_work.pop(work)
                    free.append(reads[tick][stage])
        return writes, reads, count

    def idle_share(self) -> float:
        """Returns a stage's idle time as a share of its work, if a backward takes twice as long as a forward and
        neighbours wait for each other in both exchanges of a tick."""
        # The time at which each stage is done with what it has executed so far.
        clocks = [0.0] * self.stages
        for forward, backward in zip(self.forward, self.backward, strict=True):
            for phase, cost in ((forward, 1), (backward, 2)):
                clocks = [
                    clock + (cost / self.chunks if work else 0) for clock, work in zip(clocks, phase, strict=True)
                ]
                clocks = self._wait_for_neighbours(clocks)
        work = self.microbatches * 3
        return (max(clocks) - work) / work

    def _wait_for_neighbours(self, clocks: list[float]) -> list[float]:
        """Returns the times at which each stage has exchanged with its neighbours, which form a ring if there are
        several chunks."""
        if self.chunks > 1:
            neighbours = [{(s - 1) % self.stages, s, (s + 1) % self.stages} for s in range(self.stages)]
        else:
            neighbours = [set(range(max(0, s - 1), min(self.stages, s + 2))) for s in range(self.stages)]
        return [max(clocks[stage] for stage in exchanging) for exchanging in neighbours]

    def check(self) -> None:
        """Asserts that all work is done exactly once, in an order that the engine can execute."""
        forward_ticks = _ticks_of_work(self.forward)
        pieces = self.stages * self.chunks
        all_work = {(mb, piece) for mb in range(self.microbatches) for piece in range(pieces)}
        assert set(forward_ticks) == all_work, "every microbatch goes forward through every piece"
        for (microbatch, piece), tick in forward_ticks.items():
            follows = piece == 0 or forward_ticks[microbatch, piece - 1] == tick - 1
            assert follows, "a forward comes one tick after that of the previous piece"
        if not self.backward:
            return
        backward_ticks = _ticks_of_work(self.backward)
        assert set(backward_ticks) == all_work, "every microbatch goes backward through every piece"
        for (microbatch, piece), tick in backward_ticks.items():
            assert forward_ticks[microbatch, piece] <= tick, "no backward comes before its forward"
            if piece + 1 < pieces:
                follows = backward_ticks[microbatch, piece + 1] == tick - 1
                assert follows, "a backward comes one tick after that of the next piece"

    def draw(self) -> str:
        """Draws the table as text: one line per stage and one column per tick, forwards over backwards; letters are
        chunks."""

        def cell(work: Work | None) -> str:
            if work is None:
                return "·"
            return f"{work.microbatch}{chr(ord('a') + work.chunk) if self.chunks > 1 else ''}"

        width = max((len(cell(w)) for phase in (self.forward, self.backward) for row in phase for w in row), default=1)
        lines = []
        for stage in range(self.stages):
            for label, phase in (("F", self.forward), ("B", self.backward)):
                if phase:
                    head = f"stage {stage:<3}{label}" if label == "F" else f"         {label}"
                    lines.append(f"{head} " + " ".join(cell(row[stage]).rjust(width) for row in phase))
        return "\n".join(lines)


def _ticks_of_work(phase: PhaseTable) -> dict[tuple[int, int], int]:
    """Maps (microbatch, piece) to its tick. Asserts that each occurs once."""
    ticks: dict[tuple[int, int], int] = {}
    for tick, row in enumerate(phase):
        for stage, work in enumerate(row):
            if work is not None:
                key = (work.microbatch, work.chunk * len(row) + stage)
                assert key not in ticks, f"{key} is done twice"
                ticks[key] = tick
    return ticks


def build_schedule(name: str, stages: int, microbatches: int, chunks: int = 1) -> PipelineSchedule:
    """Returns the schedule with this name: gpipe, 1f1b, interleaved, or forward (no backward, for evaluation)."""
    assert stages >= 1 and microbatches >= 1 and chunks >= 1
    entries = list(_entries(stages, microbatches, chunks))
    # Backward begins after all forwards, or in the tick in which the first loss is computed.
    first_back = entries[-1][0] + stages if name == "gpipe" else stages * chunks - 1
    # Work moves one stage per tick: forwards from stage 0 up, backwards from the last stage down.
    forward = [(tick + stage, stage, work) for tick, work in entries for stage in range(stages)]
    backward = []
    if name != "forward":
        backward = [
            (first_back + tick + stages - 1 - stage, stage, Work(work.microbatch, chunks - 1 - work.chunk))
            for tick, work in entries
            for stage in range(stages)
        ]
    ticks = 1 + max(tick for tick, _, _ in forward + backward)
    schedule = PipelineSchedule(
        name, stages, chunks, microbatches,
        _table(forward, ticks, stages), _table(backward, ticks, stages) if backward else (),
    )  # fmt: skip
    schedule.check()
    return schedule


def _entries(stages: int, microbatches: int, chunks: int) -> Iterator[tuple[int, Work]]:
    """Yields (tick, work) of stage 0: microbatches in groups of `stages`, each group through all chunks before the next
    group.

    So the last stage finishes a chunk one tick before the first stage begins the next chunk. A last group that is not
    full leaves gaps.
    """
    for group in range(0, microbatches, stages):
        for chunk in range(chunks):
            for offset in range(min(stages, microbatches - group)):
                yield group * chunks + chunk * stages + offset, Work(group + offset, chunk)


def _table(entries: list[tuple[int, int, Work]], ticks: int, stages: int) -> PhaseTable:
    """Returns the table with these entries (tick, stage, work)."""
    rows: list[list[Work | None]] = [[None] * stages for _ in range(ticks)]
    for tick, stage, work in entries:
        assert rows[tick][stage] is None, "a stage does one thing at a time"
        rows[tick][stage] = work
    return tuple(map(tuple, rows))


class Table(NamedTuple):
    """A schedule as arrays that the loop over its ticks reads. -1 means none."""

    rows: dict[str, np.ndarray]
    """forward, backward: [tick, stage, (microbatch, chunk, slot)].
    enter: [tick], the microbatch whose embedding is the first stage's input.
    loss: [tick], the microbatch whose output the last stage computes.
    leave: [tick], the microbatch whose input gradient the first stage computes.
    pending: [tick, (write, read)], the slots that store the loss's gradient until the last stage's backward."""
    slots: int = 0
    pending_slots: int = 0


def schedule_table(schedule: PipelineSchedule) -> Table:
    """Returns the table of a schedule; without backward it has only the rows forward, enter and loss."""
    last = schedule.chunks - 1
    if not schedule.backward:
        forward = _phase_array(schedule.forward, [[0] * schedule.stages] * schedule.ticks)
        return Table(
            {"forward": forward, "enter": _microbatches_at(forward, 0, 0), "loss": _microbatches_at(forward, -1, last)}
        )
    writes, reads, slots = schedule.slots()
    forward, backward = _phase_array(schedule.forward, writes), _phase_array(schedule.backward, reads)
    loss = _microbatches_at(forward, -1, last)
    loss_used = _microbatches_at(backward, -1, last)
    rows = {
        "forward": forward,
        "backward": backward,
        "enter": _microbatches_at(forward, 0, 0),
        "loss": loss,
        "leave": _microbatches_at(backward, 0, 0),
        # The slot is the microbatch's index: a schedule that delays any loss gradient delays all of them.
        "pending": np.maximum(np.stack([loss, loss_used], axis=1), 0),
    }
    return Table(rows, slots, 0 if (loss == loss_used).all() else schedule.microbatches)


def _phase_array(phase: PhaseTable, slots: list[list[int]]) -> np.ndarray:
    """Returns a phase as an array, [tick, stage, (microbatch, chunk, slot)]."""
    return np.array(
        [
            [(-1, 0, 0) if work is None else (*work, slot) for work, slot in zip(row, slot_row, strict=True)]
            for row, slot_row in zip(phase, slots, strict=True)
        ],
        np.int32,
    )


def _microbatches_at(phase: np.ndarray, stage: int, chunk: int) -> np.ndarray:
    """Returns the microbatch that a stage works on in this chunk, [tick]."""
    return np.where(phase[:, stage, 1] == chunk, phase[:, stage, 0], -1)


def even_sizes(layers: int, pieces: int) -> list[int]:
    """Returns the number of layers in each piece, as even as possible."""
    return [layers // pieces + (piece < layers % pieces) for piece in range(pieces)]


Slots = list[list[int | None]]
"""The unit in each slot, [stage][slot], chunk after chunk; None where a chunk has fewer units than slots."""


def unit_slots(
    groups: Sequence[LayerGroup], stages: int, chunks: int, sizes: Sequence[int] | None = None
) -> dict[str, Slots]:
    """Returns the unit of each group of layers in each slot of each stage. Every unit is placed exactly once.

    `sizes` are the layers of each piece in the order of the model; by default as even as whole units allow. Raises
    `ValueError` for sizes that cut a unit, and if there are fewer units than pieces.
    """
    units = [(group.name, index, len(group.pattern)) for group in groups for index in range(group.units)]
    ends = list(itertools.accumulate(width for *_, width in units))
    pieces = stages * chunks
    if len(units) < pieces:
        raise ValueError(
            f"mesh.pipeline: the pipeline has {pieces} pieces (stages × chunks), but the {ends[-1]} layers form only "
            f"{len(units)} units (repetitions of the pattern); lower mesh.pipeline or pipeline.chunks"
        )
    cuts = _units_before_cuts(ends, sizes) if sizes is not None else _even_units_before_cuts(ends, pieces)
    parts = [units[start:end] for start, end in itertools.pairwise([0, *cuts])]
    return {group.name: _slots_of(group.name, parts, stages, chunks) for group in groups}


def _units_before_cuts(ends: list[int], sizes: Sequence[int]) -> list[int]:
    """Returns the number of units before the end of each piece, from the number of layers in each piece."""
    piece_ends = list(itertools.accumulate(sizes))
    inside = next((layer for layer in piece_ends if layer not in ends), None)
    if inside is not None:
        raise ValueError(
            f"pipeline.layers: {list(sizes)} cuts the pattern of layers after layer {inside}; each piece must end with "
            f"a whole repetition of the pattern, after layer {', '.join(map(str, ends))}"
        )
    return [ends.index(layer) + 1 for layer in piece_ends]


def _even_units_before_cuts(ends: list[int], pieces: int) -> list[int]:
    """Returns the number of units before the end of each piece, as even as possible: exactly even if all units have the
    same size, else each piece ends with the unit nearest to an even cut."""
    if len({b - a for a, b in itertools.pairwise([0, *ends])}) == 1:
        return list(itertools.accumulate(even_sizes(len(ends), pieces)))
    cuts: list[int] = []
    for piece in range(1, pieces + 1):
        # Every piece has a unit: leave one for each piece that follows.
        low, high = (cuts[-1] if cuts else 0) + 1, len(ends) - (pieces - piece)
        even_end = ends[-1] * piece / pieces
        cuts.append(min(range(low, high + 1), key=lambda count: abs(ends[count - 1] - even_end)))
    return cuts


def _slots_of(name: str, parts: list[list[tuple[str, int, int]]], stages: int, chunks: int) -> Slots:
    """Returns the slots of one group of layers."""
    units = [[index for group, index, _ in part if group == name] for part in parts]
    depth = max(map(len, units))
    padded = lambda piece: [*units[piece], *[None] * (depth - len(units[piece]))]
    slots = [[unit for chunk in range(chunks) for unit in padded(chunk * stages + stage)] for stage in range(stages)]
    placed = sorted(unit for row in slots for unit in row if unit is not None)
    assert placed == list(range(sum(map(len, units)))), "every unit is placed exactly once"
    return slots
