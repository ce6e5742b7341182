"""A schedule as arrays that the loop over its ticks reads."""

from dataclasses import dataclass

import numpy as np

from jaxmnt.training.pipeline_schedule import PhaseTable, PipelineSchedule


@dataclass(frozen=True)
class Table:
    """-1 stands for nothing."""

    forward: np.ndarray
    """[tick, stage, (microbatch, chunk, slot)]"""
    backward: np.ndarray
    """[tick, stage, (microbatch, chunk, slot)]"""
    enter: np.ndarray
    """[tick]: the microbatch whose embedding goes into the first stage."""
    loss: np.ndarray
    """[tick]: the microbatch whose output comes out of the last stage."""
    leave: np.ndarray
    """[tick]: the microbatch whose input's gradient comes out of the first stage."""
    pending: np.ndarray
    """[tick, (write, read)]: where the loss's gradient waits for the last stage's backward."""
    slots: int
    pending_slots: int

    def rows(self) -> dict[str, np.ndarray]:
        names = ("forward", "backward", "enter", "loss", "leave", "pending")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of(cls, schedule: PipelineSchedule) -> "Table":
        last = schedule.chunks - 1
        if not schedule.backward:
            none = np.full(schedule.ticks, -1)
            forward = _phase_array(schedule.forward, [[0] * schedule.stages] * schedule.ticks)
            enter, loss = _passing(forward, 0, 0), _passing(forward, -1, last)
            return cls(forward, forward, enter, loss, none, none, 0, 0)
        writes, reads, slots = schedule.slots()
        forward, backward = _phase_array(schedule.forward, writes), _phase_array(schedule.backward, reads)
        loss, used = _passing(forward, -1, last), _passing(backward, -1, last)
        at_once = bool((loss == used).all())
        # A microbatch's own number serves as its slot: schedules that wait at all wait for all.
        pending = np.maximum(np.stack([loss, used], axis=1), 0)
        return cls(
            forward, backward, _passing(forward, 0, 0), loss, _passing(backward, 0, 0), pending,
            slots, 0 if at_once else schedule.microbatches,
        )  # fmt: skip


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
