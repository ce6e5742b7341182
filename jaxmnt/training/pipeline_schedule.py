"""Pipeline schedules: which stage computes what, and when. Plain Python; `engine.py` executes the table.

The model's layers are cut into `stages · chunks` pieces; piece k is chunk k // stages of stage k % stages. A tick is
one round of the engine: a stage does at most one forward and then at most one backward, and hands its results to its
neighbours, who have them in the next tick. Ticks have no fixed length: a phase in which a stage is idle is skipped.
With p stages, m microbatches and v chunks all schedules below are idle for (p - 1) / (m · v) of the work (interleaved:
if p divides m; else the last round of microbatches leaves gaps), and differ in how many microbatches a stage remembers:

gpipe        all forwards, then all backwards (Huang et al. 2018, arXiv:1811.06965): m
1f1b         a backward as soon as there is one (Narayanan et al. 2019, arXiv:1806.03377): 2 (p - stage) - 1
interleaved  the same with several chunks a stage (Narayanan et al. 2021, arXiv:2104.04473), of a smaller bubble:
             (v - 1) p + 2 (p - stage) - 1 chunks

With a program of its own for each stage, 1f1b would hold only p - stage microbatches. In one program for all stages
every exchange aligns the neighbours, so that more are under way.
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
"""[tick][stage]"""


@dataclass(frozen=True)
class PipelineSchedule:
    """What each stage does in each tick. `backward` is empty for evaluation."""

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
        """The most chunk inputs that a stage remembers at a time."""
        held, most = 0, 0
        for forward, backward in zip(self.forward, self.backward, strict=True):
            held += forward[stage] is not None
            most = max(most, held)
            held -= backward[stage] is not None
        return most

    def slots(self) -> tuple[list[list[int]], list[list[int]], int]:
        """Where each stage keeps what each forward leaves for its backward: a slot for each forward and backward
        [tick][stage] (0 where there is none), and how many slots there are."""
        count = max(self.in_flight(stage) for stage in range(self.stages))
        writes = [[0] * self.stages for _ in range(self.ticks)]
        reads = [[0] * self.stages for _ in range(self.ticks)]
        for stage in range(self.stages):
            free, kept = list(range(count)), {}
            for tick in range(self.ticks):
                if (work := self.forward[tick][stage]) is not None:
                    writes[tick][stage] = kept[work] = free.pop(0)
                if (work := self.backward[tick][stage]) is not None:
                    reads[tick][stage] = kept.pop(work)
                    free.append(reads[tick][stage])
        return writes, reads, count

    def idle_share(self) -> float:
        """Idle time of a stage as a share of its work, when a backward takes twice as long as a forward, and neighbours
        wait for each other in both exchanges of a tick."""
        clocks = [0.0] * self.stages
        for ahead, back in zip(self.forward, self.backward, strict=True):
            for phase, price in ((ahead, 1), (back, 2)):
                clocks = [
                    clock + (price / self.chunks if work else 0) for clock, work in zip(clocks, phase, strict=True)
                ]
                clocks = self._meet(clocks)
        work = self.microbatches * 3
        return (max(clocks) - work) / work

    def _meet(self, clocks: list[float]) -> list[float]:
        """When each stage has exchanged with the stages beside it, which are a ring if there are several chunks."""
        if self.chunks > 1:
            near = [{(s - 1) % self.stages, s, (s + 1) % self.stages} for s in range(self.stages)]
        else:
            near = [set(range(max(0, s - 1), min(self.stages, s + 2))) for s in range(self.stages)]
        return [max(clocks[other] for other in others) for others in near]

    def check(self) -> None:
        """Asserts that all is done, once, in an order that the engine can follow."""
        ahead = _times(self.forward)
        pieces = self.stages * self.chunks
        wanted = {(mb, piece) for mb in range(self.microbatches) for piece in range(pieces)}
        assert set(ahead) == wanted, "every microbatch goes forward through every piece"
        for (microbatch, piece), tick in ahead.items():
            assert piece == 0 or ahead[microbatch, piece - 1] == tick - 1, "a forward follows the one before by a tick"
        if not self.backward:
            return
        back = _times(self.backward)
        assert set(back) == wanted, "every microbatch comes back through every piece"
        for (microbatch, piece), tick in back.items():
            assert ahead[microbatch, piece] <= tick, "no backward comes before its forward"
            if piece + 1 < pieces:
                assert back[microbatch, piece + 1] == tick - 1, "a backward follows the one after by a tick"

    def draw(self) -> str:
        """The table as text: a line a stage, a column a tick, forwards over backwards; letters are chunks."""

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


def _times(phase: PhaseTable) -> dict[tuple[int, int], int]:
    """(microbatch, piece) → tick, each of which occurs once."""
    found: dict[tuple[int, int], int] = {}
    for tick, row in enumerate(phase):
        for stage, work in enumerate(row):
            if work is not None:
                key = (work.microbatch, work.chunk * len(row) + stage)
                assert key not in found, f"{key} is done twice"
                found[key] = tick
    return found


def build_schedule(name: str, stages: int, microbatches: int, chunks: int = 1) -> PipelineSchedule:
    """The schedule of this name: gpipe, 1f1b, interleaved, or forward (no backward, for evaluation)."""
    assert stages >= 1 and microbatches >= 1 and chunks >= 1
    entries = list(_entries(stages, microbatches, chunks))
    # Backward begins after all forwards, or in the tick in which the loss is first known.
    first_back = entries[-1][0] + stages if name == "gpipe" else stages * chunks - 1
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
    """(tick, work) of stage 0: microbatches in groups of `stages`, each group through all chunks before the next.

    So the last stage's chunk ends a tick before the first stage begins the next chunk. A last group that is not full
    leaves gaps.
    """
    for group in range(0, microbatches, stages):
        for chunk in range(chunks):
            for offset in range(min(stages, microbatches - group)):
                yield group * chunks + chunk * stages + offset, Work(group + offset, chunk)


def _table(items: list[tuple[int, int, Work]], ticks: int, stages: int) -> PhaseTable:
    rows: list[list[Work | None]] = [[None] * stages for _ in range(ticks)]
    for tick, stage, work in items:
        assert rows[tick][stage] is None, "a stage does one thing at a time"
        rows[tick][stage] = work
    return tuple(map(tuple, rows))


class Table(NamedTuple):
    """A schedule as arrays that the loop over its ticks reads. -1 stands for nothing."""

    rows: dict[str, np.ndarray]
    """forward, backward: [tick, stage, (microbatch, chunk, slot)].
    enter: [tick], the microbatch whose embedding goes into the first stage.
    loss: [tick], the microbatch whose output comes out of the last stage.
    leave: [tick], the microbatch whose input's gradient comes out of the first stage.
    pending: [tick, (write, read)], where the loss's gradient waits for the last stage's backward."""
    slots: int = 0
    pending_slots: int = 0


def schedule_table(schedule: PipelineSchedule) -> Table:
    """Returns the table of a schedule; that of one without backward has rows for forward, enter and loss."""
    last = schedule.chunks - 1
    if not schedule.backward:
        forward = _phase_array(schedule.forward, [[0] * schedule.stages] * schedule.ticks)
        return Table({"forward": forward, "enter": _passing(forward, 0, 0), "loss": _passing(forward, -1, last)})
    writes, reads, slots = schedule.slots()
    forward, backward = _phase_array(schedule.forward, writes), _phase_array(schedule.backward, reads)
    loss, used = _passing(forward, -1, last), _passing(backward, -1, last)
    rows = {
        "forward": forward,
        "backward": backward,
        "enter": _passing(forward, 0, 0),
        "loss": loss,
        "leave": _passing(backward, 0, 0),
        # A microbatch's own number serves as its slot: schedules that wait at all wait for all.
        "pending": np.maximum(np.stack([loss, used], axis=1), 0),
    }
    return Table(rows, slots, 0 if (loss == used).all() else schedule.microbatches)


def _phase_array(phase: PhaseTable, slots: list[list[int]]) -> np.ndarray:
    return np.array(
        [
            [(-1, 0, 0) if work is None else (*work, slot) for work, slot in zip(row, slot_row, strict=True)]
            for row, slot_row in zip(phase, slots, strict=True)
        ],
        np.int32,
    )


def _passing(phase: np.ndarray, stage: int, chunk: int) -> np.ndarray:
    """[tick]: the microbatch that a stage works on in this chunk."""
    return np.where(phase[:, stage, 1] == chunk, phase[:, stage, 0], -1)


def even_sizes(layers: int, pieces: int) -> list[int]:
    """Layers of each piece, as even as possible."""
    return [layers // pieces + (piece < layers % pieces) for piece in range(pieces)]


Slots = list[list[int | None]]
"""[stage][slot], chunk after chunk: which unit lies there; None where a chunk has fewer."""


def unit_slots(
    groups: Sequence[LayerGroup], stages: int, chunks: int, sizes: Sequence[int] | None = None
) -> dict[str, Slots]:
    """Which unit of each group of layers lies in each slot of each stage. Every unit is placed exactly once.

    `sizes` are the layers of each piece in order of the model; by default as even as whole units allow. Raises
    `ValueError` for sizes that cut a unit, and if there are fewer units than pieces.
    """
    units = [(group.name, index, len(group.pattern)) for group in groups for index in range(group.units)]
    ends = list(itertools.accumulate(width for *_, width in units))
    pieces = stages * chunks
    if len(units) < pieces:
        raise ValueError(
            f"mesh.pipeline: {pieces} pieces of a pipeline need as many units of layers, and the pattern of layers "
            f"makes {len(units)} of {ends[-1]} layers; lower it, or pipeline.chunks"
        )
    cuts = _cuts(ends, sizes) if sizes is not None else _even_cuts(ends, pieces)
    parts = [units[start:end] for start, end in itertools.pairwise([0, *cuts])]
    return {group.name: _slots_of(group.name, parts, stages, chunks) for group in groups}


def _cuts(ends: list[int], sizes: Sequence[int]) -> list[int]:
    """After how many units each piece ends, from the layers of each."""
    wanted = list(itertools.accumulate(sizes))
    inside = next((layer for layer in wanted if layer not in ends), None)
    if inside is not None:
        raise ValueError(
            f"pipeline.layers: {list(sizes)} cuts the pattern of layers after layer {inside}; a piece must end with a "
            f"whole repetition: after one of {', '.join(map(str, ends))}"
        )
    return [ends.index(layer) + 1 for layer in wanted]


def _even_cuts(ends: list[int], pieces: int) -> list[int]:
    """The same, as even as possible: exactly, if all units are alike, else each piece ends with the unit that is
    nearest."""
    if len({b - a for a, b in itertools.pairwise([0, *ends])}) == 1:
        return list(itertools.accumulate(even_sizes(len(ends), pieces)))
    cuts: list[int] = []
    for piece in range(1, pieces + 1):
        low, high = (cuts[-1] if cuts else 0) + 1, len(ends) - (pieces - piece)
        wanted = ends[-1] * piece / pieces
        cuts.append(min(range(low, high + 1), key=lambda count: abs(ends[count - 1] - wanted)))
    return cuts


def _slots_of(name: str, parts: list[list[tuple[str, int, int]]], stages: int, chunks: int) -> Slots:
    own = [[index for group, index, _ in part if group == name] for part in parts]
    depth = max(map(len, own))
    filled = lambda piece: [*own[piece], *[None] * (depth - len(own[piece]))]
    slots = [[unit for chunk in range(chunks) for unit in filled(chunk * stages + stage)] for stage in range(stages)]
    placed = sorted(unit for row in slots for unit in row if unit is not None)
    assert placed == list(range(sum(map(len, own)))), "every unit is placed exactly once"
    return slots
