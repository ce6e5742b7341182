"""Pipeline schedules as tables: everything is done once, in order, with the idle time and memory of the theory."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmnt.models.contract import LayerGroup
from jaxmnt.training.pipeline_schedule import Slot, Work, build_schedule, schedule_table, unit_slots

stages = st.integers(1, 8)
microbatches = st.integers(1, 24)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(["gpipe", "1f1b"]), stages=stages, microbatches=microbatches)
def test_idle_time_is_the_formula(name, stages, microbatches):
    """(p - 1) / m of the work, with backward twice as dear as forward."""
    schedule = build_schedule(name, stages, microbatches)
    assert schedule.idle_share() == pytest.approx((stages - 1) / microbatches)


@settings(max_examples=40, deadline=None)
@given(stages=st.integers(2, 8), groups=st.integers(1, 5), chunks=st.integers(2, 4))
def test_idle_time_of_interleaved_is_the_formula(stages, groups, chunks):
    """(p - 1) / (m · v) of the work, when the stages divide the microbatches."""
    schedule = build_schedule("interleaved", stages, stages * groups, chunks)
    assert schedule.idle_share() == pytest.approx((stages - 1) / (stages * groups * chunks))


@settings(max_examples=60, deadline=None)
@given(stages=stages, microbatches=microbatches, chunks=st.integers(1, 3))
def test_a_stage_holds_what_its_depth_asks_for(stages, microbatches, chunks):
    schedule = build_schedule("interleaved" if chunks > 1 else "1f1b", stages, microbatches, chunks)
    for stage in range(stages):
        bound = (chunks - 1) * stages + 2 * (stages - stage) - (not schedule.steady_ticks)
        assert schedule.in_flight(stage) <= min(bound, microbatches * chunks)
    if stages > 1:  # the first stage stores no more than if its backward came one tick earlier
        assert schedule.in_flight(0) <= (chunks + 1) * stages - 1
    gpipe = build_schedule("gpipe", stages, microbatches)
    assert [gpipe.in_flight(stage) for stage in range(stages)] == [microbatches] * stages


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved"]), stages=stages, microbatches=microbatches,
    chunks=st.integers(2, 3), reuses_slots=st.booleans(),
)  # fmt: skip
def test_slots_are_free_when_they_are_written(name, stages, microbatches, chunks, reuses_slots):
    chunks = chunks if name == "interleaved" else 1
    schedule = build_schedule(name, stages, microbatches, chunks, reuses_slots=reuses_slots)
    writes, reads, count = schedule.assign_slots()
    for stage in range(stages):
        held: dict[int, tuple[Work, int]] = {}
        for tick in range(schedule.ticks):
            write, read = writes[tick][stage], reads[tick][stage]
            forward, backward = schedule.forward[tick][stage], schedule.backward[tick][stage]
            if tick in schedule.steady_ticks and reuses_slots:
                assert held.pop(read.number) == (backward, read.is_reversed)
                assert write == Slot(read.number, 1 - read.is_reversed)
                backward = None
            if forward is not None:
                assert write.number not in held and 0 <= write.number < count
                held[write.number] = forward, write.is_reversed
            if backward is not None:
                assert held.pop(read.number) == (backward, read.is_reversed)
        assert not held


@settings(max_examples=60, deadline=None)
@given(stages=st.integers(1, 6), microbatches=st.integers(1, 60), chunks=st.integers(1, 3))
def test_steady_ticks_run_two_microbatches_side_by_side(stages, microbatches, chunks):
    """In steady ticks no backward needs what the same tick computes."""
    chunks = chunks if stages > 1 else 1
    name = "interleaved" if chunks > 1 else "1f1b"
    schedule = build_schedule(name, stages, microbatches, chunks, side_by_side=True)
    arrays, _, pending_slots = schedule_table(schedule)
    steady = schedule.steady_ticks
    if microbatches % stages == 0:
        expected = microbatches * chunks - stages * (chunks + 1) + 1
        assert len(steady) == (expected if 2 * expected >= microbatches * chunks + stages * (chunks + 1) - 1 else 0)
    for tick in steady:
        for stage in range(stages):
            forward, backward = schedule.forward[tick][stage], schedule.backward[tick][stage]
            assert forward is not None and backward is not None and forward != backward
    assert pending_slots == (2 if steady else 0)
    held = {}
    for tick in range(schedule.ticks):  # the loss's gradient is written before one is read, or in steady ticks after
        write, read = arrays["pending"][tick]
        used = arrays["backward"][tick, -1]
        if tick in steady and used[1] == chunks - 1:
            assert held[read] == used[0]
        if arrays["loss"][tick] >= 0:
            held[write] = arrays["loss"][tick]
        if used[0] >= 0 and used[1] == chunks - 1:
            assert held[read] == used[0]


@pytest.mark.parametrize(("name", "stages"), [("gpipe", 2), ("forward", 2), ("1f1b", 1)])
def test_other_schedules_have_no_steady_ticks(name, stages):
    assert not build_schedule(name, stages, 9).steady_ticks


def test_the_checker_finds_what_is_wrong():
    good = build_schedule("1f1b", 3, 4)
    table = [list(row) for row in good.forward]
    for spoil in (
        lambda rows: rows[2].__setitem__(2, None),  # one is missing
        lambda rows: rows[6].__setitem__(0, Work(0, 0)),  # one is done twice
        lambda rows: rows.insert(1, rows.pop(2)),  # one comes before what it needs
    ):
        rows = [list(row) for row in table]
        spoil(rows)
        with pytest.raises(AssertionError):
            dataclasses.replace(good, forward=tuple(map(tuple, rows))).check()
    early = (*good.backward[1:], good.backward[0])
    with pytest.raises(AssertionError):
        dataclasses.replace(good, backward=early).check()


def test_drawing():
    assert build_schedule("1f1b", 2, 3).draw().splitlines() == [
        "stage 0  F 0 1 2 · ·",
        "         B · · 0 1 2",
        "stage 1  F · 0 1 2 ·",
        "         B · 0 1 2 ·",
    ]
    # Half of the ticks of nine microbatches are steady, so backward begins a tick later.
    assert build_schedule("1f1b", 2, 9).draw().splitlines() == [
        "stage 0  F 0 1 2 3 4 5 6 7 8 · · ·",
        "         B · · · 0 1 2 3 4 5 6 7 8",
        "stage 1  F · 0 1 2 3 4 5 6 7 8 · ·",
        "         B · · 0 1 2 3 4 5 6 7 8 ·",
    ]
    assert "0a 1a 0b 1b" in build_schedule("interleaved", 2, 2, 2).draw()


@given(stages=stages, chunks=st.integers(1, 3), extra=st.integers(0, 20), data=st.data())
def test_every_layer_is_placed_once(stages, chunks, extra, data):
    pieces = stages * chunks
    layers = pieces + extra
    cuts = sorted(data.draw(st.lists(st.integers(0, extra), min_size=pieces - 1, max_size=pieces - 1)))
    sizes = [1 + b - a for a, b in zip([0, *cuts], [*cuts, extra], strict=True)]
    for chosen in (None, sizes):
        slots = unit_slots([LayerGroup("layers", ("layer",), layers)], stages, chunks, chosen)["layers"]
        assert sorted(layer for row in slots for layer in row if layer is not None) == list(range(layers))
        assert len({len(row) for row in slots}) == 1


@settings(max_examples=60, deadline=None)
@given(
    prefix=st.integers(0, 3), width=st.integers(1, 4), units=st.integers(1, 12), stages=st.integers(1, 4),
    chunks=st.integers(1, 2),
)  # fmt: skip
def test_units_of_several_groups_stay_in_order(prefix, width, units, stages, chunks):
    """Pieces, read one after another, give the model's units; no piece is empty."""
    groups = [LayerGroup("dense", ("dense",), prefix)] if prefix else []
    groups.append(LayerGroup("layers", ("layer",) * width, units))
    if prefix + units < stages * chunks:
        with pytest.raises(ValueError, match=f"{stages * chunks} pieces"):
            unit_slots(groups, stages, chunks)
        return
    slots = unit_slots(groups, stages, chunks)
    read = []
    for piece in range(stages * chunks):
        chunk, stage = divmod(piece, stages)
        own = []
        for group in groups:
            row = slots[group.name][stage]
            depth = len(row) // chunks
            own += [(group.name, unit) for unit in row[chunk * depth : (chunk + 1) * depth] if unit is not None]
        assert own
        read += own
    assert read == [(group.name, unit) for group in groups for unit in range(group.units)]
