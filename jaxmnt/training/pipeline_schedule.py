"""Pipeline schedules: tables of what each stage computes in each tick. They are plain Python, and `engine.py` executes
the table.

The model's layers are cut into `stages · chunks` pieces, and piece k is chunk k // stages of stage k % stages. A tick
is one iteration of the engine. In a tick a stage runs at most one forward and then at most one backward, and sends its
results to its neighbours, which receive them in the next tick. Ticks have no fixed length, because a stage skips a
phase in which it is idle. With p stages, m microbatches and v chunks, all schedules below are idle for
(p - 1) / (m · v) of the work. For interleaved this requires that m is a multiple of p; otherwise the last group of
microbatches leaves gaps. The schedules differ in the number of microbatches whose activations a stage stores:

gpipe        all forwards, then all backwards (Huang et al. 2018, arXiv:1811.06965): m
1f1b         each backward in the tick after the previous one (Narayanan et al. 2019, arXiv:1806.03377): 2 (p - stage)
interleaved  1f1b with several chunks per stage (Narayanan et al. 2021, arXiv:2104.04473) and a smaller bubble:
             (v - 1) p + 2 (p - stage) chunks

A forward in a steady tick reuses the slot of the backward beside it. So no stage stores more than (v + 1) p - 1 chunks,
if the model has one group of layers.

With a separate program for each stage, 1f1b would store only p - stage microbatches. In one program for all stages
every exchange synchronises the neighbours, so more microbatches are in flight.
"""

import functools
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


class Slot(NamedTuple):
    """Where a stage stores the residuals of a pass from its forward to its backward."""

    number: int = 0
    is_reversed: int = 0
    """1 if the slot has the residuals of the chunk's last unit first, else 0. In a steady tick the forward runs the
    units in the opposite order of the backward beside it. So it can store each unit's residuals where the backward has
    just read some, if it reverses the slot."""


@dataclass(frozen=True)
class PipelineSchedule:
    """The work of each stage in each tick. `backward` is empty for evaluation."""

    name: str
    stages: int
    chunks: int
    microbatches: int
    forward: PhaseTable
    backward: PhaseTable
    side_by_side: bool = False
    """True if backward begins a tick later than it could, so that a tick's forward and backward do not need each
    other."""
    reuses_slots: bool = True
    """True if a forward in a steady tick takes the slot of the backward beside it, which requires that all layers of
    the model belong to one group."""

    @property
    def ticks(self) -> int:
        return len(self.forward)

    @functools.cached_property
    def steady_ticks(self) -> range:
        """The longest run of ticks in which every stage has a forward and a backward that do not need each other."""
        if not self.side_by_side:
            return range(0)
        ticks_and_work = zip(self.forward, self.backward, strict=True)
        has_both = [None not in (*forward, *backward) for forward, backward in ticks_and_work]
        longest = range(0)
        for is_steady, ticks in itertools.groupby(range(len(has_both)), key=has_both.__getitem__):
            run = list(ticks)
            if is_steady and len(run) > len(longest):
                longest = range(run[0], run[-1] + 1)
        return longest

    def in_flight(self, stage: int) -> int:
        """Returns the maximum number of chunk inputs that a stage stores at a time."""
        stored_inputs, max_stored_inputs = 0, 0
        for tick in range(self.ticks):
            has_forward = self.forward[tick][stage] is not None
            has_backward = self.backward[tick][stage] is not None
            shared_inputs = self._reuses_slot(tick)
            max_stored_inputs = max(max_stored_inputs, stored_inputs + has_forward - shared_inputs)
            stored_inputs += has_forward - has_backward
        return max_stored_inputs

    def _reuses_slot(self, tick: int) -> bool:
        """Returns True if the forwards of a tick take the slots of the backwards."""
        return self.reuses_slots and tick in self.steady_ticks

    def assign_slots(self) -> tuple[list[list[Slot]], list[list[Slot]], int]:
        """Assigns slots in which each stage stores residuals from each forward to its backward. Returns the slots that
        forwards write and those that backwards read, [tick][stage] with `Slot()` for idle phases, and the number of
        slots."""
        slot_count = max(self.in_flight(stage) for stage in range(self.stages))
        write_slots = [[Slot()] * self.stages for _ in range(self.ticks)]
        read_slots = [[Slot()] * self.stages for _ in range(self.ticks)]
        for stage in range(self.stages):
            free_slots, slot_of_work = [Slot(number) for number in range(slot_count)], dict[Work, Slot]()
            for tick in range(self.ticks):
                forward, backward = self.forward[tick][stage], self.backward[tick][stage]
                if backward is not None and self._reuses_slot(tick):
                    read_slots[tick][stage] = slot = slot_of_work.pop(backward)
                    assert forward is not None
                    write_slots[tick][stage] = slot_of_work[forward] = Slot(slot.number, 1 - slot.is_reversed)
                    continue
                if forward is not None:
                    write_slots[tick][stage] = slot_of_work[forward] = free_slots.pop(0)
                if backward is not None:
                    read_slots[tick][stage] = slot_of_work.pop(backward)
                    free_slots.append(read_slots[tick][stage])
        return write_slots, read_slots, slot_count

    def idle_share(self) -> float:
        """Returns a stage's idle time as a share of its work time. This assumes that a backward takes twice as long as
        a forward and that neighbours wait for each other in both exchanges of a tick."""
        # The time at which each stage finishes what it has executed so far.
        clocks = [0.0] * self.stages
        for forward, backward in zip(self.forward, self.backward, strict=True):
            for phase, cost in ((forward, 1), (backward, 2)):
                clocks = [
                    clock + (cost / self.chunks if work else 0) for clock, work in zip(clocks, phase, strict=True)
                ]
                clocks = self._wait_for_neighbours(clocks)
        work_time = self.microbatches * 3
        return (max(clocks) - work_time) / work_time

    def _wait_for_neighbours(self, clocks: list[float]) -> list[float]:
        """Returns the time at which each stage finishes the exchange with its neighbours. If there are several chunks,
        the stages form a ring."""
        if self.chunks > 1:
            exchanges = [{(stage - 1) % self.stages, stage, (stage + 1) % self.stages} for stage in range(self.stages)]
        else:
            exchanges = [set(range(max(0, stage - 1), min(self.stages, stage + 2))) for stage in range(self.stages)]
        return [max(clocks[stage] for stage in exchange) for exchange in exchanges]

    def check(self) -> None:
        """Asserts that all work is done exactly once, in an order that the engine can execute."""
        forward_ticks = _ticks_of_work(self.forward)
        pieces = self.stages * self.chunks
        all_work = set(itertools.product(range(self.microbatches), range(pieces)))
        assert set(forward_ticks) == all_work, "every microbatch goes forward through every piece"
        for (microbatch, piece), tick in forward_ticks.items():
            is_next_tick = piece == 0 or forward_ticks[microbatch, piece - 1] == tick - 1
            assert is_next_tick, "a forward comes one tick after that of the previous piece"
        if not self.backward:
            return
        backward_ticks = _ticks_of_work(self.backward)
        assert set(backward_ticks) == all_work, "every microbatch goes backward through every piece"
        for (microbatch, piece), tick in backward_ticks.items():
            assert forward_ticks[microbatch, piece] <= tick, "no backward comes before its forward"
            if piece + 1 < pieces:
                is_next_tick = backward_ticks[microbatch, piece + 1] == tick - 1
                assert is_next_tick, "a backward comes one tick after that of the next piece"

    def draw(self) -> str:
        """Draws the table as text, with one column for each tick. Each stage has a line of forwards above a line of
        backwards. Numbers stand for microbatches, and letters for chunks."""

        def cell(work: Work | None) -> str:
            if work is None:
                return "·"
            return f"{work.microbatch}{chr(ord('a') + work.chunk) if self.chunks > 1 else ''}"

        cells = [cell(work) for phase in (self.forward, self.backward) for row in phase for work in row]
        width = max(map(len, cells), default=1)
        lines = []
        for stage in range(self.stages):
            for label, phase in (("F", self.forward), ("B", self.backward)):
                if phase:
                    line_start = f"stage {stage:<3}{label}" if label == "F" else f"         {label}"
                    lines.append(f"{line_start} " + " ".join(cell(row[stage]).rjust(width) for row in phase))
        return "\n".join(lines)


def _ticks_of_work(phase: PhaseTable) -> dict[tuple[int, int], int]:
    """Maps each (microbatch, piece) to the tick in which the phase does this work. Asserts that none is done twice."""
    ticks: dict[tuple[int, int], int] = {}
    for tick, row in enumerate(phase):
        for stage, work in enumerate(row):
            if work is not None:
                key = (work.microbatch, work.chunk * len(row) + stage)
                assert key not in ticks, f"{key} is done twice"
                ticks[key] = tick
    return ticks


def build_schedule(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    *,
    side_by_side: bool | None = None,
    reuses_slots: bool = True,
) -> PipelineSchedule:
    """Returns the schedule with this name: gpipe, 1f1b, interleaved, or forward (no backward, for evaluation).

    1f1b and interleaved run a forward and a backward side by side if `side_by_side`, by default in a pipeline, and if
    at least half of the ticks are then steady.
    """
    assert stages >= 1 and microbatches >= 1 and chunks >= 1
    entries = list(_first_stage_entries(stages, microbatches, chunks))
    has_steady_ticks = name in ("1f1b", "interleaved") and (stages > 1 if side_by_side is None else side_by_side)
    # Backward begins after all forwards, in the tick of the first loss, or one tick later, so that a stage's backward
    # never needs the forward of the same tick.
    first_loss_tick = stages * chunks - 1
    first_backward_tick = entries[-1][0] + stages if name == "gpipe" else first_loss_tick + has_steady_ticks
    # Work moves one stage per tick, from the first stage to the last in the forward pass, and the other way in the
    # backward pass.
    forward = [(tick + stage, stage, work) for tick, work in entries for stage in range(stages)]
    backward = []
    if name != "forward":
        backward = [
            (first_backward_tick + tick + stages - 1 - stage, stage, Work(work.microbatch, chunks - 1 - work.chunk))
            for tick, work in entries
            for stage in range(stages)
        ]
    ticks = 1 + max(tick for tick, _, _ in forward + backward)
    schedule = PipelineSchedule(
        name, stages, chunks, microbatches,
        _phase_table(forward, ticks, stages), _phase_table(backward, ticks, stages) if backward else (),
        has_steady_ticks, reuses_slots,
    )  # fmt: skip
    if has_steady_ticks and 2 * len(schedule.steady_ticks) < ticks:
        return build_schedule(name, stages, microbatches, chunks, side_by_side=False)
    schedule.check()
    return schedule


def _first_stage_entries(stages: int, microbatches: int, chunks: int) -> Iterator[tuple[int, Work]]:
    """Yields (tick, work) for stage 0. Microbatches run in groups of `stages`, and each group goes through all chunks
    before the next group starts.

    So the last stage finishes a chunk one tick before the first stage begins the next chunk. If the last group is not
    full, it leaves gaps.
    """
    for group in range(0, microbatches, stages):
        for chunk in range(chunks):
            for offset in range(min(stages, microbatches - group)):
                yield group * chunks + chunk * stages + offset, Work(group + offset, chunk)


def _phase_table(entries: list[tuple[int, int, Work]], ticks: int, stages: int) -> PhaseTable:
    """Returns the table of a phase from entries (tick, stage, work)."""
    rows: list[list[Work | None]] = [[None] * stages for _ in range(ticks)]
    for tick, stage, work in entries:
        assert rows[tick][stage] is None, "a stage does one thing at a time"
        rows[tick][stage] = work
    return tuple(map(tuple, rows))


class Table(NamedTuple):
    """A schedule as arrays, which the loop over its ticks reads. -1 stands for no microbatch."""

    arrays: dict[str, np.ndarray]
    """forward, backward: [tick, stage, (microbatch, chunk, slot, 1 if the slot is reversed)].
    enter: [tick], the microbatch whose embedding is the first stage's input.
    loss: [tick], the microbatch whose output the last stage computes.
    leave: [tick], the microbatch whose input gradient the first stage computes.
    pending: [tick, (write, read)], the slots that store the loss's gradient until the last stage's backward."""
    slots: int = 0
    pending_slots: int = 0


def schedule_table(schedule: PipelineSchedule) -> Table:
    """Returns the table of a schedule. Without backward it has only the arrays forward, enter and loss."""
    last_chunk = schedule.chunks - 1
    if not schedule.backward:
        forward = _phase_array(schedule.forward, [[Slot()] * schedule.stages] * schedule.ticks)
        enter, loss = _microbatches_at(forward, 0, 0), _microbatches_at(forward, -1, last_chunk)
        return Table({"forward": forward, "enter": enter, "loss": loss})
    write_slots, read_slots, slot_count = schedule.assign_slots()
    forward = _phase_array(schedule.forward, write_slots)
    backward = _phase_array(schedule.backward, read_slots)
    loss = _microbatches_at(forward, -1, last_chunk)
    loss_use = _microbatches_at(backward, -1, last_chunk)
    arrays = {
        "forward": forward,
        "backward": backward,
        "enter": _microbatches_at(forward, 0, 0),
        "loss": loss,
        "leave": _microbatches_at(backward, 0, 0),
    }
    pending_slots = _most_pending(loss, loss_use)
    arrays["pending"] = np.maximum(np.stack([loss, loss_use], axis=1), 0) % max(pending_slots, 1)
    return Table(arrays, slot_count, pending_slots)


def _most_pending(loss: np.ndarray, loss_use: np.ndarray) -> int:
    """Returns the largest number of microbatches in a tick whose loss has been computed, and whose last stage has not
    finished its backward before this tick. The arguments have the microbatch of each tick. 0 if none has to wait."""
    if (loss == loss_use).all():
        return 0
    computed, used = np.cumsum(loss >= 0), np.cumsum(loss_use >= 0)
    used_before = np.concatenate([[0], used[:-1]])
    return int((computed - used_before).max())


def _phase_array(phase: PhaseTable, slots: list[list[Slot]]) -> np.ndarray:
    """Returns a phase with its slots as an array, [tick, stage, (microbatch, chunk, slot, is reversed)]."""
    return np.array(
        [
            [(-1, 0, *Slot()) if work is None else (*work, *slot) for work, slot in zip(row, slot_row, strict=True)]
            for row, slot_row in zip(phase, slots, strict=True)
        ],
        np.int32,
    )


def _microbatches_at(phase: np.ndarray, stage: int, chunk: int) -> np.ndarray:
    """Returns an array [tick] with the microbatch that this stage passes through this chunk, or -1."""
    return np.where(phase[:, stage, 1] == chunk, phase[:, stage, 0], -1)


def even_sizes(layers: int, pieces: int) -> list[int]:
    """Returns the number of layers in each piece if the pieces are as even as possible."""
    return [layers // pieces + (piece < layers % pieces) for piece in range(pieces)]


Slots = list[list[int | None]]
"""The unit in each slot, [stage][slot], chunk after chunk; None where a chunk has fewer units than slots."""


def unit_slots(
    groups: Sequence[LayerGroup], stages: int, chunks: int, sizes: Sequence[int] | None = None
) -> dict[str, Slots]:
    """Returns the unit of each group of layers in each slot of each stage. Every unit is placed exactly once.

    `sizes` has the number of layers in each piece, in the order of the model. By default the pieces are as even as
    whole units allow. Raises `ValueError` for sizes that cut a unit, or if there are fewer units than pieces."""
    units = [(group.name, index, len(group.pattern)) for group in groups for index in range(group.units)]
    ends = list(itertools.accumulate(width for *_, width in units))
    pieces = stages * chunks
    if len(units) < pieces:
        raise ValueError(
            f"mesh.pipeline: the pipeline has {pieces} pieces (stages × chunks), but the {ends[-1]} layers form only "
            f"{len(units)} units (repetitions of the pattern); lower mesh.pipeline or pipeline.chunks"
        )
    cuts = _units_before_cuts(ends, sizes) if sizes is not None else _even_units_before_cuts(ends, pieces)
    units_of_pieces = [units[start:end] for start, end in itertools.pairwise([0, *cuts])]
    return {group.name: _group_slots(group.name, units_of_pieces, stages, chunks) for group in groups}


def _units_before_cuts(ends: list[int], sizes: Sequence[int]) -> list[int]:
    """Returns the number of units before the end of each piece, from the number of layers in each piece."""
    piece_ends = list(itertools.accumulate(sizes))
    cut_layer = next((layer for layer in piece_ends if layer not in ends), None)
    if cut_layer is not None:
        raise ValueError(
            f"pipeline.layers: {list(sizes)} cuts the pattern of layers after layer {cut_layer}; each piece must end "
            f"with a complete repetition of the pattern, after one of the layers {', '.join(map(str, ends))}"
        )
    return [ends.index(layer) + 1 for layer in piece_ends]


def _even_units_before_cuts(ends: list[int], pieces: int) -> list[int]:
    """Returns the number of units before the end of each piece, with pieces as even as possible. If all units have the
    same size, the numbers of units are as even as possible. Otherwise each piece ends with the unit whose end is
    nearest to an even cut."""
    unit_sizes = {end - start for start, end in itertools.pairwise([0, *ends])}
    if len(unit_sizes) == 1:
        return list(itertools.accumulate(even_sizes(len(ends), pieces)))
    cuts: list[int] = []
    for piece in range(1, pieces + 1):
        # Every piece needs a unit, so leave at least one for each piece that follows.
        min_cut = (cuts[-1] if cuts else 0) + 1
        max_cut = len(ends) - (pieces - piece)
        even_end = ends[-1] * piece / pieces
        cuts.append(min(range(min_cut, max_cut + 1), key=lambda cut: abs(ends[cut - 1] - even_end)))
    return cuts


def _group_slots(name: str, units_of_pieces: list[list[tuple[str, int, int]]], stages: int, chunks: int) -> Slots:
    """Returns the slots of one group of layers."""
    units_by_piece = [[index for group, index, _ in units if group == name] for units in units_of_pieces]
    depth = max(map(len, units_by_piece))
    padded = [[*units, *[None] * (depth - len(units))] for units in units_by_piece]
    slots = [[unit for chunk in range(chunks) for unit in padded[chunk * stages + stage]] for stage in range(stages)]
    placed_units = sorted(unit for stage_slots in slots for unit in stage_slots if unit is not None)
    assert placed_units == list(range(sum(map(len, units_by_piece)))), "every unit is placed exactly once"
    return slots
