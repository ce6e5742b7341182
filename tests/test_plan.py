"""What a plan says: read from programs whose collectives are known, and held to what the scheme needs at least."""

import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.machinery import ModuleSpec

import jax
import pytest
from conftest import ROOT, command, in_tiers

from jaxmnt.config.load import load_config, parse_config
from jaxmnt.errors import ConfigError
from jaxmnt.plan import report as plan_report
from jaxmnt.plan.budget import minimum_traffic, small_traffic_bound
from jaxmnt.plan.chips import CHIPS, find_target
from jaxmnt.plan.costs import Costs
from jaxmnt.plan.dry_run import cluster_size, dry_run
from jaxmnt.plan.hlo import Program, collective_of, shapes_in
from jaxmnt.plan.rates import Rates, rates_of
from jaxmnt.plan.report import HOST_WAIT_SECONDS, condition_rows, ideal_state_bytes, make_report
from jaxmnt.plan.show import _memory_lines, _round_lines
from jaxmnt.plan.targets import gpu_devices
from jaxmnt.plan.timeline import replay_program
from jaxmnt.plan.zero import choose_zero
from jaxmnt.run.arguments import parse_arguments
from jaxmnt.training.build import build_spec
from jaxmnt.training.compile import compile_step
from jaxmnt.training.memory_suggestions import describe_suggestions, find_memory_suggestions
from jaxmnt.training.state import abstract_state

PROGRAM = """
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %sum = f32[] add(%a, %b)
}

%layer (p: (s32[], bf16[2,8])) -> (s32[], bf16[2,8]) {
  %p = (s32[], bf16[2,8]{1,0}) parameter(0)
  %gather = (bf16[2,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%x), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, metadata={op_name="jit(step)/layer/all_gather"}, backend_config={"collective_backend_config":{"is_sync":false}}
  %done = bf16[8,8]{1,0} all-gather-done(%gather)
}

%branch (p: f32[16]) -> f32[16] {
  %scatter = f32[4]{0} reduce-scatter(%p), channel_id=3, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, to_apply=%add, metadata={op_name="jit(step)/cond/loss/reduce_scatter"}
}

%other (p: f32[16]) -> f32[16] {
  ROOT %p = f32[16]{0} parameter(0)
}

ENTRY %main (x: bf16[2,8]) -> f32[] {
  %loop = (s32[], bf16[2,8]{1,0}) while(%init), condition=%test, body=%layer, backend_config={"known_trip_count":{"n":"5"}}
  %choice = f32[16]{0} conditional(%flag, %y, %y), true_computation=%branch, false_computation=%other
  %sum = (f32[4]{0}, f32[2]{0}) all-reduce-start(%a, %b), channel_id=4, replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_0'}, to_apply=%add, backend_config={"collective_backend_config":{"is_sync":true}}
  %hop = (f32[16]{0}, f32[16]{0}) collective-permute-start(%y), channel_id=5, source_target_pairs={{0,2},{2,4},{4,6}}
  ROOT %all = f32[] all-reduce(%z), replica_groups={}, to_apply=%add
}
"""  # noqa: E501


def test_collectives_are_read_from_the_text():
    share = lambda where: 0.25 if "loss" in where else None
    found = replay_program(Program(PROGRAM), 8, share=share).collectives
    gather, scatter, pair, hop, everyone = (played.collective for played in found)
    assert [played.times for played in found] == [5, 0.25, 1, 1, 1]
    assert (gather.kind, gather.payload, gather.asynchronous) == ("all-gather", 128, True)
    assert gather.groups == ((0, 1, 2, 3), (4, 5, 6, 7)) and gather.sent == 96
    assert (scatter.kind, scatter.payload, scatter.asynchronous) == ("reduce-scatter", 64, False)
    assert scatter.groups == ((0, 2, 4, 6), (1, 3, 5, 7)) and scatter.sent == 48
    assert (pair.kind, pair.payload, pair.asynchronous) == ("all-reduce", 24, False)
    assert pair.groups == ((0, 1), (2, 3), (4, 5), (6, 7)) and pair.sent == 24
    assert (hop.kind, hop.payload, hop.groups, hop.sent) == ("collective-permute", 64, ((0, 2), (2, 4), (4, 6)), 64)
    assert everyone.groups == (tuple(range(8)),) and everyone.sent == 2 * 4 * 7 / 8
    assert ("bf16", (8, 8)) in shapes_in(PROGRAM)


@pytest.mark.parametrize("result", ["f32[8]{0}", "((f32[8]{0}), f32[8]{0})", "(f32[4]{0}, f32[4]{0})"])
def test_a_sum_that_is_started_is_read_in_every_form(result):
    line = f"  %s = {result} all-reduce-start(%a), channel_id=1, replica_groups={{{{0,1}}}}, to_apply=%add"
    text = f"ENTRY %main (a: f32[8]) -> f32[8] {{\n{line}\n}}\n"
    [one] = [collective_of(instruction, 2) for instruction in Program(text).computations["main"]]
    assert (one.payload, one.asynchronous) == (32, True)


def test_a_loop_and_its_groups_are_read_from_a_real_program():
    """A program of which it is plain what it sends, compiled here: jaxlib may change how it writes."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def local(x):
        return jax.lax.fori_loop(0, 7, lambda _, x: jax.lax.psum(x, "b") * 0.5, x)

    x = jax.ShapeDtypeStruct((8, 4), "float32")
    spec = jax.sharding.PartitionSpec("a", None)
    function = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    [played] = replay_program(Program(jax.jit(function).lower(x).compile().as_text()), 8).collectives
    one = played.collective
    assert (one.kind, one.dtype, one.payload, played.times) == ("all-reduce", "f32", 4 * 4 * 4, 7)
    assert one.groups == ((0, 1, 2, 3), (4, 5, 6, 7))


# A layer of 2 s whose gather of 3 s is waited for after the first of its two products; a scatter that holds up.
OVERLAPPING = """
HloModule jit_step, is_scheduled=true

%product (p: bf16[100,50], q: bf16[50,10]) -> bf16[100,10] {
  %p = bf16[100,50]{1,0} parameter(0)
  %q = bf16[50,10]{1,0} parameter(1)
  ROOT %dot = bf16[100,10]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%slice (p: f32[8,1000], q: s32[]) -> f32[8,1000] {
  %p = f32[8,1000]{1,0} parameter(0)
  %q = s32[] parameter(1)
  %piece = f32[1,1000]{1,0} dynamic-slice(%p, %q, %q), dynamic_slice_sizes={1,1000}
  %more = f32[1,1000]{1,0} add(%piece, %piece)
  ROOT %update = f32[8,1000]{1,0} dynamic-update-slice(%p, %more, %q, %q)
}

%layer (c: (s32[], bf16[100,50])) -> (s32[], bf16[100,50]) {
  %c = (s32[], bf16[100,50]{1,0}) parameter(0)
  %x = bf16[100,50]{1,0} get-tuple-element(%c), index=1
  %w = bf16[50,10]{1,0} get-tuple-element(%c), index=1
  %start = (bf16[10]{0}, bf16[40]{0}) all-gather-start(%w), replica_groups={{0,1,2,3}}, dimensions={0}
  %first = bf16[100,10]{1,0} fusion(%x, %w), kind=kOutput, calls=%product, metadata={op_name="jit(step)/stage_forward/dot"}
  %done = bf16[40]{0} all-gather-done(%start)
  %second = bf16[100,10]{1,0} fusion(%x, %w), kind=kOutput, calls=%product
  %sent = f32[10]{0} reduce-scatter(%second), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
  ROOT %out = (s32[], bf16[100,50]{1,0}) tuple(%c, %x)
}

ENTRY %main (x: bf16[100,50]) -> f32[] {
  %x = bf16[100,50]{1,0} parameter(0)
  %loop = (s32[], bf16[100,50]{1,0}) while(%x), condition=%test, body=%layer, backend_config={"known_trip_count":{"n":"5"}}
  %state = f32[8,1000]{1,0} parameter(1)
  %index = s32[] parameter(2)
  ROOT %written = f32[8,1000]{1,0} fusion(%state, %index), kind=kLoop, calls=%slice
}
"""  # noqa: E501


class Clockwork(Rates):
    """Gathers take 3 s, and all else that is sent 0.5 s."""

    def collective_seconds(self, kind, payload, groups, host_of):
        return 3.0 if kind == "all-gather" else 0.5


def test_a_step_is_played_on_timelines():
    product = 2 * 100 * 10 * 50
    rates = Clockwork({"bfloat16": product, "float32": 1.0}, 1.0, 1e6, 1.0, 1.0, 1.0)
    step = replay_program(Program(OVERLAPPING), 4, rates)
    gather, scatter = step.collectives
    # A round: product 1 s, 2 s of the gather's 3 s are waited for, product 1 s, scatter 0.5 s.
    assert (gather.times, gather.seconds, gather.exposed) == (5, 15, pytest.approx(10))
    assert (gather.flops, gather.work_meanwhile) == (5 * product, pytest.approx(5))
    assert (scatter.seconds, scatter.exposed) == (pytest.approx(2.5), pytest.approx(2.5))
    written = (2 * 4 * 1000 + 4) / 1e6  # a slice is read and written, and its index read
    assert step.seconds == pytest.approx(5 * 4.5 + written) and step.flops == 10 * product
    assert step.exposed == pytest.approx(12.5)
    [other] = step.other_work
    assert (other.instruction.name, other.times, other.seconds) == ("written", 1, pytest.approx(written))
    [layer] = step.rounds
    assert (layer.name, layer.times, layer.seconds) == ("layer", 5, pytest.approx(4.5))
    assert "stage_forward" in layer.scopes
    assert gather.span == pytest.approx((0, 3, 1)) and scatter.span == pytest.approx((4, 4.5, 4))


def test_a_round_is_drawn():
    """Light where the device works on, dark where it waits; what takes next to nothing is counted together."""
    begin = {"kind": "all-gather", "axis": "fsdp", "dtype": "bf16", "bytes_sent": 2**20}
    spans = ((0.0, 0.5, 0.25), (0.5, 0.75, 0.9), (0.9, 0.905, 0.9), (0.91, 0.912, 1.0))
    entries = [begin | dict(zip(("begins", "ends", "waited_for"), span, strict=True)) for span in spans]
    told = _round_lines({"of": "a layer forward", "times": 4, "seconds": 1.0, "collectives": entries})
    assert told == [
        "a layer forward: 4 × 1 s",
        f"        all-gather  fsdp  bf16  1 MiB  ▕{'░' * 10}{'█' * 10}{' ' * 20}▏  500 ms  250 ms exposed",
        f"        all-gather  fsdp  bf16  1 MiB  ▕{' ' * 20}{'░' * 10}{' ' * 10}▏  250 ms  hidden",
        "        2 of less than 1 %: 7 ms, 5 ms exposed",
    ]


def played_with_another_gather(groups, whole, host_of=lambda device: 0):
    """The first and the second gather of a step that starts both before its first product."""
    text = OVERLAPPING.replace(
        "  %first =",
        f"  %other = (bf16[10]{{0}}, bf16[{whole}]{{0}}) all-gather-start(%w), replica_groups={groups}\n  %first =",
    ).replace("  %second =", f"  %done.2 = bf16[{whole}]{{0}} all-gather-done(%other)\n  %second =")
    rates = Clockwork({"bfloat16": 2 * 100 * 10 * 50, "float32": 1.0}, 1.0, 1e9, 1.0, 1.0, 1.0)
    return replay_program(Program(text), 4, rates, host_of).collectives[:2]


def test_what_goes_between_hosts_runs_beside_what_does_not():
    """One gather of four devices and one of two, on hosts of two."""
    first, second = played_with_another_gather("{{0,1},{2,3}}", 20, lambda device: device // 2)
    assert (first.exposed, second.exposed) == (pytest.approx(10), pytest.approx(0))


def test_communication_that_is_under_way_delays_what_comes_next():
    """One after the other, as on the device: a second gather begins when the first is over."""
    first, second = played_with_another_gather("{{0,1,2,3}}", 40)
    assert (first.exposed, second.exposed) == (pytest.approx(10), pytest.approx(15))


# Ticks of a pipeline, in two of three of which a stage has layers to go through.
TICKS = """
%busy (c: s32[]) -> s32[] {
  %c = s32[] parameter(0)
  ROOT %loop = s32[] while(%c), body=%layer, backend_config={"known_trip_count":{"n":"5"}}, metadata={op_name="busy"}
}

%idle (c: s32[]) -> s32[] {
  ROOT %c = s32[] parameter(0)
}

%tick (c: s32[]) -> s32[] {
  %c = s32[] parameter(0)
  ROOT %choice = s32[] conditional(%c, %c, %c), true_computation=%busy, false_computation=%idle
}

ENTRY"""


def test_links_do_not_fall_behind_in_a_loop_of_conditions():
    """A stage waits for no more than what was sent, however many ticks there are."""
    before, after = OVERLAPPING.split("ENTRY")
    after = after.replace("body=%layer", "body=%tick").replace('"n":"5"', '"n":"12"')
    after = after.replace(
        "  %loop =", "  %first = bf16[100,10]{1,0} fusion(%x, %x), kind=kOutput, calls=%product\n  %loop ="
    )
    last = "%sum = f32[10]{0} reduce-scatter(%x), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add"
    text = before + TICKS + after.replace("  ROOT", f"  {last}\n  ROOT")
    rates = Clockwork({"bfloat16": 2 * 100 * 10 * 50, "float32": 1.0}, 1.0, 1e6, 1.0, 1.0, 1.0)
    step = replay_program(Program(text), 4, rates, share=lambda where: 2 / 3 if "busy" in where else None)
    gather, scatter, last = step.collectives
    assert last.exposed == pytest.approx(0.5) and gather.times == pytest.approx(12 * 5 * 2 / 3)
    assert (gather.exposed, scatter.exposed) == (pytest.approx(2 * gather.times), pytest.approx(0.5 * gather.times))


def test_conditions_are_counted_by_what_they_control():
    """A loop of known length has none, and one of unknown length one more than iterations."""
    before, after = OVERLAPPING.split("ENTRY")
    after = after.replace("body=%layer", "body=%tick").replace('"n":"5"', '"n":"12"')
    text = before + TICKS + after
    share = lambda where: 2 / 3 if "busy" in where else None
    step = replay_program(Program(text), 4, share=share)
    [choice] = step.conditions
    assert (choice.is_loop, choice.times, choice.scopes) == (False, 12, ("", "busy"))

    unknown = '"known_trip_count":{"n":"5"}', '"n":"?"'
    text = text.replace(*unknown).replace('op_name="busy"', 'op_name="busy/about_5_rounds/while"')
    choice, loop = replay_program(Program(text), 4, share=share).conditions
    assert loop.is_loop and "stage_forward" in loop.scopes
    assert (choice.times, loop.times) == (12, pytest.approx(12 * 2 / 3 * (1 + 5)))
    layer, tick = condition_rows(replay_program(Program(text), 4, share=share))
    assert (layer["kind"], layer["of"], layer["times"]) == ("loop", "a layer forward", 48)
    assert (tick["kind"], tick["of"], tick["seconds"]) == ("branch", "the step", pytest.approx(12 * HOST_WAIT_SECONDS))


@pytest.mark.parametrize(
    ("kind", "groups", "seconds"),
    [
        ("all-gather", ((0, 1, 2, 3),), 0.75 / 100),  # within a host
        ("all-reduce", ((0, 1, 2, 3),), 1.5 / 100),
        ("reduce-scatter", ((0, 4), (1, 5)), 0.5 / 10),  # one card a host
        ("all-gather", (tuple(range(8)),), 0.5 / 40),  # half of it enters each host, by four cards
        ("all-reduce", (tuple(range(8)),), 1.0 / 40),
        ("collective-permute", ((0, 1), (1, 2)), 1 / 100),
        ("collective-permute", ((0, 1), (3, 4)), 1 / 10),
        ("host-copy", (), 1 / 5),
    ],
)
def test_what_a_collective_takes(kind, groups, seconds):
    """A whole of 1 GB, 100 GB/s in a host, 10 GB/s a network card; hosts of four."""
    rates = Rates({}, 1.0, 1.0, 100e9, 10e9, 5e9)
    took = (
        rates.copy_seconds(1e9)
        if kind == "host-copy"
        else rates.collective_seconds(kind, 1e9, groups, lambda device: device // 4)
    )
    assert took == pytest.approx(seconds, abs=3e-4)


def test_what_attention_multiplies():
    """Two products forward, five backward, over half of the pairs or those of a window."""
    line = (
        '  %a = (bf16[1,4,64,8]{3,2,1,0}) custom-call(%q), custom_call_target="__cudnn$fmhaSoftmax<backward>", '
        'backend_config={"intermediate_tensor_shape":{"dimensions":["1","4","64","64"]},"mask_type":"CAUSAL",'
        '"sliding_window_length":<window>}'
    )
    for backward, window, flops in (("", 0, 2), ("Backward", 0, 5), ("", 16, 2 * 16 / 32)):
        text = "HloModule m\n\nENTRY %e (q: bf16[1,64,4,8]) -> f32[] {\n  %q = bf16[1,64,4,8]{3,2,1,0} parameter(0)\n"
        program = Program(text + line.replace("<backward>", backward).replace("<window>", str(window)) + "\n}\n")
        costs = Costs(program, Rates({}, 1e3, 1e30, 1.0, 1.0, 1.0))
        [_, attention] = program.computations["e"]
        assert costs.cost("e", attention)[1] == 2 * 4 * (64 * 64 / 2) * 8 * flops
        assert costs.cost("e", attention)[0] == costs.cost("e", attention)[1] / 1e3


def test_the_rates_of_every_chip_are_known():
    for chip in CHIPS.values():
        rates = rates_of(chip)
        assert rates.products["bfloat16"] > rates.products["float32"] > 0, chip.kind


def report_for_128_gpus(recipe, overrides, monkeypatch):
    """The spec, the report and the text of a program that is compiled for 16 hosts of 8 H100s."""
    compiled = []
    monkeypatch.setattr(
        plan_report, "compile_step", lambda *given: compiled.append(compile_step(*given)) or compiled[-1]
    )
    config = load_config(recipe, overrides.split())
    devices = gpu_devices(CHIPS["h100"], 16, 8)
    spec = build_spec(config, config.model.vocab_size, devices, lambda device: str(device.process_index))
    report = make_report(spec, lambda device: device.process_index, CHIPS["h100"])
    return spec, report, compiled[0].as_text()


def hold_to_budget(spec, report):
    """Bytes by kind and axis at most 1.05 of the least, and what has no budget small."""
    sent = Counter()
    for entry in report["collectives"]:
        sent[entry["kind"], entry["axis"]] += entry["bytes_sent"]
    needed = minimum_traffic(spec)
    for key, size in needed.items():
        assert 0.95 * size < sent[key] <= 1.05 * size, (key, sent[key] / size)
    rest = {key: size for key, size in sent.items() if key not in needed}
    assert sum(rest.values()) <= small_traffic_bound(spec), rest


MESHES = [
    ({"fsdp": 8}, "dots"),
    ({"fsdp": 8, "zero": 1}, "none"),
    ({"fsdp": 8, "zero": 2}, "full"),
    ({"fsdp": 2, "model": 4}, "none"),
    ({"fsdp": 2, "model": 4}, "dots"),
    ({"fsdp": 2, "model": 4}, "full"),
    ({"data": 2, "pipeline": 2, "model": 2}, "full"),
    ({"pipeline": 2, "fsdp": 2, "model": 2, "zero": 1}, "dots"),
    ({"data": 2, "fsdp": 2, "model": 2}, "attention"),
    ({"pipeline": 4, "fsdp": 2}, "dots"),
    ({"fsdp": 2, "model": 4, "overlap": "ring"}, "dots"),
    ({"fsdp": 2, "model": 4, "overlap": "ring"}, "full"),
    ({"fsdp": 2, "model": 4, "overlap": "rows"}, "dots"),
    ({"fsdp": 2, "model": 4, "optimizer": "muon"}, "none"),
    ({"pipeline": 2, "fsdp": 4, "optimizer": "muon"}, "full"),
]


@pytest.mark.parametrize(("mesh", "remat"), in_tiers({0, 5, 10, 13}, MESHES), ids=str)
def test_no_more_is_sent_than_the_scheme_needs(mesh, remat):
    """On virtual devices, where all is float32."""
    chosen = parse_config(
        {
            "data": {"global_batch_size": 16, "sequence_length": 32},
            "model": {
                "vocab_size": 512, "hidden_size": 256, "num_layers": 4, "num_heads": 4, "intermediate_size": 512,
                "overlap": mesh.get("overlap", "auto"),
            },
            "train": {
                "precision": "float32", "microbatch_size": 2 if mesh.get("overlap") == "rows" else 1, "remat": remat,
                "loss_chunk_mib": 1,
            },
            "mesh": {axis: size for axis, size in mesh.items() if axis not in ("overlap", "optimizer")},
            "optimizer": {"kind": mesh.get("optimizer", "adamw")},
        }
    )  # fmt: skip
    spec = build_spec(chosen, 512, jax.devices())
    hold_to_budget(spec, make_report(spec, lambda device: 0, None))


@pytest.mark.slow
def test_a_plan_of_virtual_devices(tmp_path):
    """The whole command: the tables, the same as JSON, and no need of the data."""
    path = tmp_path / "tiny.yaml"
    tree = {
        "data": {"path": "nowhere", "global_batch_size": 16, "sequence_length": 32},
        "model": {"vocab_size": 250, "hidden_size": 64, "num_layers": 4, "num_heads": 4},
        "train": {"microbatch_size": 2},
        "mesh": {"pipeline": 2, "fsdp": 2, "model": 2},
    }
    path.write_text(json.dumps(tree))
    arguments = ("jaxmnt.train", "--config", str(path), "--dry-run", "--devices", "16", "--devices-per-host", "4")
    shown = command(*arguments)
    assert shown.returncode == 0, shown.stderr
    for words in (
        "data 2 × pipeline 2 × fsdp 2 × model 2: 16 cpu on 4 hosts", "data 1, pipeline 1, fsdp 0-1, model 0-1",
        "zero    3, chosen by mesh.zero: auto (3 sends ", "there is no data sheet for cpu devices, so", "host 3",
        "250 is padded with zeros to 252", "1f1b: 2 microbatches through 2 stages", "stage 0  F 0 1",
        "embedding and loss are divided by vocabulary",
        "layers.mlp.gate", "layers:pipeline", "peak", "collective-permute", "devices of a host",
    ):  # fmt: skip
        assert words in shown.stdout, words
    told = json.loads(command(*arguments, "--json").stdout)
    assert told["mesh"] == {"data": 2, "pipeline": 2, "fsdp": 2, "model": 2} and told["devices"]["hosts"] == 4
    assert told["memory"]["peak"] > told["memory"]["params"] > 0
    assert told["zero"]["zero"] == 3 and told["zero"]["auto"] and len(told["zero"]["stages"]) == 3
    permute = next(entry for entry in told["collectives"] if entry["kind"] == "collective-permute")
    assert permute["axis"] == "pipeline" and permute["times"] == 2 * told["schedule"]["ticks"]
    table = next(entry for entry in told["parameters"] if entry["name"] == "embedding.table")
    assert table["shape"] == [252, 64] and table["split"] == ["model×pipeline", "fsdp"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--devices", "8"), ["--devices", "add --dry-run"]),
        (("--json",), ["--json", "add --dry-run"]),
        (("--dry-run", "--target", "h10"), ["--target", "'h10'", "did you mean h100"]),
        (("--dry-run", "--target", "h100", "--devices", "8"), ["--devices", "exclude each other"]),
        (("--dry-run", "--hosts", "2"), ["--hosts", "--target"]),
        (("--dry-run", "--devices", "0"), ["--devices", "0"]),
        (("--dry-run", "--devices", "16", "mesh.model=16"), ["mesh.model", "span the hosts host 0, host 1"]),
        (("--dry-run", "--devices", "8", "mesh.fsdp=3"), ["mesh", "fsdp=3", "8 devices"]),
        (("--dry-run", "--devices", "2", "model.vocab_size=null"), ["data.path"]),
        (("--dry-run", "--devices", "1", "train.loss=losses.raising"), ["train.loss", "losses.py:"]),
    ],
)
def test_what_cannot_be_planned_is_said(tmp_path, arguments, words):
    path = tmp_path / "tiny.yaml"
    model = {"vocab_size": 64, "num_heads": 16, "hidden_size": 64, "num_layers": 2}
    path.write_text(json.dumps({"model": model, "data": {"path": str(tmp_path / "no"), "sequence_length": 32}}))
    told = command("jaxmnt.train", "--config", str(path), *arguments, PYTHONPATH=str(ROOT / "tests"))
    assert told.returncode == 2 and "Traceback" not in told.stderr, told.stderr
    for word in words:
        assert word in told.stderr, told.stderr


@pytest.mark.parametrize(
    ("overrides", "target", "hosts", "per_host", "cluster"),
    [
        ((), "h100", 16, None, (16, 8)),  # mesh.fsdp: -1 takes whole hosts
        ((), "gb200", 16, None, (16, 4)),
        ((), "h100", 16, 2, (16, 2)),
        (("mesh.fsdp=1", "mesh.data=-1", "mesh.model=4"), "h100", 2, None, (2, 8)),
        (("mesh.fsdp=64", "mesh.data=1"), "h100", None, None, (8, 8)),
        (("mesh.fsdp=64", "mesh.data=1"), "h100", None, 4, (16, 4)),
        (("mesh.fsdp=2", "mesh.data=2"), "h100", None, None, (1, 4)),
    ],
)
@pytest.mark.parametrize("recipe", ["llama-8b", "qwen-72b"])
def test_an_axis_of_the_rest_takes_whole_hosts(recipe, overrides, target, hosts, per_host, cluster):
    config = load_config(ROOT / "configs" / f"{recipe}.yaml", list(overrides))
    assert cluster_size(config, find_target(target)[1], hosts, per_host) == cluster


@pytest.mark.parametrize(("arguments", "option"), [((), "--devices"), (("--target", "h100"), "--hosts")])
def test_a_plan_is_told_how_many_devices_an_axis_of_the_rest_has(arguments, option):
    options = parse_arguments(["--config", "none", "--dry-run", *arguments])
    with pytest.raises(ConfigError, match=rf"{option}: mesh.fsdp takes all devices .* give {option}$"):
        dry_run(load_config(ROOT / "configs" / "llama-8b.yaml"), options)


CLUSTER_MESHES = [
    "",  # the recipe's own
    "mesh.fsdp=16 mesh.model=8",
    "mesh.fsdp=1 mesh.data=8 mesh.pipeline=2 mesh.model=8 train.microbatch_size=1",
    "mesh.fsdp=1 mesh.data=2 mesh.pipeline=8 mesh.model=8 train.microbatch_size=1",
]


CLUSTER_PROGRAMS = [(mesh, recipe) for mesh in CLUSTER_MESHES for recipe in ("llama-8b", "qwen-72b")]


@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")  # such programs cannot be loaded
@pytest.mark.parametrize(("mesh", "recipe"), in_tiers(set(), CLUSTER_PROGRAMS), ids=str)
def test_the_program_of_128_gpus_keeps_to_its_budget(mesh, recipe, monkeypatch):
    """The real GPU program: what it sends, what it keeps, and that nothing whole is anywhere."""
    recipe_file = ROOT / "configs" / f"{recipe}.yaml"
    spec, report, text = report_for_128_gpus(recipe_file, mesh, monkeypatch)
    config = spec.config
    hold_to_budget(spec, report)
    memory = report["memory"]
    assert memory["params"] + memory["optimizer"] <= 1.01 * ideal_state_bytes(spec)
    assert memory["peak"] <= CHIPS["h100"].memory
    if spec.schedule.steady_ticks and spec.placement.stages == 1:
        estimated_peaks = {stage.zero: stage.peak for stage in choose_zero(spec, CHIPS["h100"]).stages}
        assert memory["peak"] == pytest.approx(estimated_peaks[spec.zero], rel=0.1)
    step = report["timeline"]
    assert step["work_seconds"] > 3 and sum(one["exposed_seconds"] for one in report["collectives"]) == pytest.approx(
        step["exposed_seconds"], rel=1e-2
    )
    if not mesh:
        assert step["exposed_percent"] <= {"llama-8b": 3, "qwen-72b": 1}[recipe]
    # Attention's output is kept with the products (dots), and computed again with whole layers (full).
    # Layers are there twice if forward and backward run side by side in most ticks.
    halves = 2 if spec.placement.overlap == "rows" else 1
    copies = 2 if spec.schedule.steady_ticks else 1
    assert text.count('"__cudnn$fmhaSoftmax"') == copies * halves * {"dots": 1, "full": 2}[config.train.remat]
    shapes = {shape for _, shape in shapes_in(text)}
    model, sizes = config.model, spec.placement.sizes
    # Layers of an MLP weight as they lie here, and the same were one axis not there to split them.
    pieces = {"pipeline": model.num_layers, "fsdp": model.hidden_size, "model": model.intermediate_size}
    local = {axis: size // sizes[axis] for axis, size in pieces.items()}
    found = {tuple(sorted(shape)) for shape in shapes}
    assert tuple(sorted(local.values())) in found
    for axis in [axis for axis in pieces if sizes[axis] > 1]:
        assert tuple(sorted((local | {axis: pieces[axis]}).values())) not in found, f"a stack whole over {axis}"
    # Tables are whole over fsdp and stages while they are used, and never over `model`.
    rows = model.vocab_size // spec.placement.num_shards_in_use("vocab")
    vocabulary = [shape for shape in shapes if len(shape) == 2 and {rows, model.vocab_size} & set(shape)]
    assert vocabulary and all(rows in shape for shape in vocabulary)
    if recipe == "llama-8b":  # whose width is not the length of a row
        assert (config.data.sequence_length, model.vocab_size) not in shapes, "the logits of a row"


@pytest.mark.slow
def test_a_plan_needs_no_cuda_toolkit_of_the_machine():
    """The extra installs all that the compiler needs: the 8B recipe is planned where no toolkit can be seen."""
    plan = [sys.executable, "-m", "jaxmnt.train", "--config", "configs/llama-8b.yaml", "--dry-run", "--target", "h100"]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    result = subprocess.run(
        [ROOT / "scripts" / "without_toolkit", *plan, "--hosts", "16"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "step    about" in result.stdout


@pytest.mark.slow
def test_what_a_plan_needs_is_no_traceback_of_a_run(tiny_file, monkeypatch):
    """JAX's plugin for CUDA is installed here, and no driver."""
    for variable in ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):  # planning in this process sets both
        monkeypatch.delenv(variable, raising=False)
    result = command("jaxmnt.train", "--config", str(tiny_file), "train.stop_after=1")
    assert result.returncode == 75 and "Traceback" not in result.stderr, result.stderr


def test_a_plan_without_a_part_of_the_compiler_names_the_extra(monkeypatch):
    """A toolkit of the machine does not count: it may be too old for the GPU, and LLVM then aborts the process."""
    plugin = ModuleSpec("jax_cuda12_plugin", None, origin="__init__.py")
    folder = ModuleSpec("jax_cuda12_plugin", None, is_package=True)
    nvidia = ModuleSpec("nvidia", None, is_package=True)
    for installed, message in [
        ({"nvidia": nvidia}, r"needs JAX's CUDA plugin.*\[plan\]"),
        ({"nvidia": nvidia, "jax_cuda12_plugin": folder}, r"needs JAX's CUDA plugin.*\[plan\]"),
        ({"nvidia": nvidia, "jax_cuda12_plugin": plugin}, r"needs NVIDIA's assembler ptxas.*\[plan\]"),
        ({"jax_cuda12_plugin": plugin}, r"needs NVIDIA's assembler ptxas.*\[plan\]"),
    ]:
        monkeypatch.setattr("importlib.util.find_spec", installed.get)
        with pytest.raises(ConfigError, match=message):
            gpu_devices(CHIPS["h100"], 1, 8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")  # such programs cannot be loaded
def test_packed_rows_are_cudnns_too():
    """Rows of 32k tokens: documents are kept apart without an array of length × length, in the memory of windows."""
    memory = {}
    for rows in ("windows", "packed"):
        overrides = (
            "train.remat=full", "train.microbatch_size=1", f"data.rows={rows}", "data.sequence_length=32768",
            "data.global_batch_size=128", "model.num_layers=4",
        )  # fmt: skip
        config = load_config(ROOT / "configs" / "llama-8b.yaml", list(overrides))
        spec = build_spec(config, config.model.vocab_size, gpu_devices(CHIPS["h100"], 16, 8))
        compiled = compile_step(spec, abstract_state(spec))
        memory[rows], text = compiled.memory_analysis().temp_size_in_bytes, compiled.as_text()
        assert text.count('"__cudnn$fmhaSoftmax"') == 2
        assert text.count('"__cudnn$fmhaSoftmaxBackward"') == 1
        length = config.data.sequence_length
        assert not [shape for _, shape in shapes_in(text) if sum(size >= length for size in shape if size) > 1]
    assert memory["packed"] <= 1.1 * memory["windows"]


PEAKS = [
    # Of 23: zeros of four gradients at the start.
    (16, "mesh.data=16 mesh.fsdp=8 train.remat=full", 18),
    # Of 3.5: those of the head's, kept for another gradient of the same shape.
    (
        8,
        "mesh.data=4 mesh.fsdp=8 mesh.model=2 model.preset=llama3.2-1b data.sequence_length=2048 "
        "data.global_batch_size=128 train.microbatch_size=1 train.remat=none",
        3.3,
    ),
    # Of 20.6: those of all layers, with one microbatch.
    (
        16,
        "mesh.data=16 mesh.fsdp=8 model.preset=qwen3-14b data.sequence_length=2048 data.global_batch_size=128 "
        "train.microbatch_size=1 train.remat=dots",
        20.1,
    ),
    # Of 9.7: the same beside the head's gradient, whole.
    (
        8,
        "mesh.data=4 mesh.fsdp=8 mesh.model=2 model.preset=qwen3-14b data.sequence_length=2048 "
        "data.global_batch_size=32 train.microbatch_size=1 train.remat=dots",
        9.2,
    ),
    # Of 11.0: the embedding and the head that the first of two microbatches has gathered.
    (
        8,
        "mesh.data=2 mesh.fsdp=32 data.sequence_length=8192 data.global_batch_size=128 train.microbatch_size=1 "
        "train.remat=full",
        9.5,
    ),
    # Of 7.5: the head's gradient, whole until the backward of all layers is done.
    (
        16,
        "mesh.fsdp=128 data.sequence_length=8192 data.global_batch_size=512 train.microbatch_size=1 train.remat=full",
        6.2,
    ),
    # Of 17.4: a copy, in another order, of the gradients of all MLPs' last weights.
    (
        8,
        "mesh.data=32 mesh.fsdp=2 model.preset=mistral-7b-v0.3 data.sequence_length=2048 data.global_batch_size=64 "
        "train.microbatch_size=1 train.remat=full",
        16.4,
    ),
]


@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")  # such programs cannot be loaded
@pytest.mark.parametrize(("hosts", "overrides", "most"), in_tiers(set(), PEAKS), ids=str)
def test_nothing_large_lies_in_memory_while_nothing_needs_it(hosts, overrides, most):
    config = load_config(ROOT / "configs" / "llama-8b.yaml", overrides.split())
    spec = build_spec(config, config.model.vocab_size, gpu_devices(CHIPS["h200"], hosts, 8))
    assert compile_step(spec, abstract_state(spec)).memory_analysis().temp_size_in_bytes < most * 2**30


@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")  # such programs cannot be loaded
@pytest.mark.parametrize("mesh", in_tiers(set(), ["mesh.model=4", "mesh.model=2 mesh.pipeline=2"]))
def test_stacks_are_not_copied_into_another_order(mesh):
    """What is gathered, XLA would have with the gathered dimension first: in the whole stacks of what forward has kept,
    and of weights."""
    overrides = (
        "mesh.fsdp=2", *mesh.split(), "train.remat=none", "train.microbatch_size=4", "data.sequence_length=4096",
        "data.global_batch_size=64", "model.num_layers=4",
    )  # fmt: skip
    config = load_config(ROOT / "configs" / "llama-8b.yaml", list(overrides))
    spec = build_spec(config, config.model.vocab_size, gpu_devices(CHIPS["h100"], 1, 8))
    assert spec.placement.overlap == "rows"
    text = compile_step(spec, abstract_state(spec)).as_text()
    depth = config.model.num_layers // spec.placement.stages
    pieces = spec.placement.num_shards("sequence")
    shape = rf"\d+,{depth},{2 * pieces},{4096 // pieces},4096"
    stacks = re.findall(rf"= bf16\[({shape})\](\{{\S+?\}}) get-tuple-element", text)
    assert stacks and {order for _, order in stacks} == {"{4,3,2,1,0}"}
    width, model = 4096 // 2, config.model.intermediate_size // spec.placement.sizes["model"]
    assert f"f32[{depth},{model},{width}]" in text, "weights of all layers, on their way out of an MLP"
    assert not re.findall(rf"= f32\[{width},{depth},{model}\]\S* transpose\(", text)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")  # such programs cannot be loaded
def test_weights_that_are_gathered_once_are_not_copied_into_another_order():
    overrides = ("mesh.fsdp=8", "mesh.zero=2", "model.num_layers=4", "data.global_batch_size=16")
    config = load_config(ROOT / "configs" / "llama-8b.yaml", list(overrides))
    spec = build_spec(config, config.model.vocab_size, gpu_devices(CHIPS["h100"], 1, 8))
    text = compile_step(spec, abstract_state(spec)).as_text()
    model = config.model
    sizes = "|".join(f"{a},{b}" for a, b in itertools.permutations([model.hidden_size, model.intermediate_size]))
    orders = re.findall(rf"= bf16\[4,(?:{sizes})\](\{{[\d,]+)", text)
    assert orders and {*orders} == {"{2,1,0"}


@pytest.mark.slow
@pytest.mark.parametrize("setting", [{"remat": "full"}, {"microbatch_size": 1}], ids=str)
def test_what_a_lever_saves_is_what_the_compiled_step_lacks(setting):
    tree = {
        "data": {"global_batch_size": 16, "sequence_length": 256},
        "model": {"vocab_size": 64, "hidden_size": 64, "num_layers": 24, "num_heads": 4, "intermediate_size": 256},
        "train": {"precision": "float32", "microbatch_size": 2, "remat": "dots"},
        "mesh": {"fsdp": 4},
    }
    build = lambda config: build_spec(config, 64, jax.devices()[:4])
    spec, changed = (build(parse_config(tree | {"train": tree["train"] | more})) for more in ({}, setting))
    [(name, value)] = setting.items()
    [suggestion] = [one for one in find_memory_suggestions(spec, build) if one.setting == f"train.{name}={value}"]
    before, after = (
        compile_step(one, abstract_state(one)).memory_analysis().temp_size_in_bytes for one in (spec, changed)
    )
    assert 0.8 * (before - after) <= suggestion.saves <= 1.1 * (before - after), (before, after)
    assert find_memory_suggestions(spec, build)[0].setting == "train.remat=full"
    memory_suggestions = find_memory_suggestions(spec, build)
    assert describe_suggestions(memory_suggestions, peak=2**20 + 1, limit=2**20).startswith("train.remat=full saves ")
    much = describe_suggestions(memory_suggestions, peak=7 * 2**40, limit=2**40)
    assert much.startswith("no single setting makes it fit: make mesh.fsdp at least 7 times as large; train")


@pytest.mark.parametrize(
    ("peak", "is_tight", "verdict"),
    [
        (0.5, False, "50%"),
        (0.99, True, "99%: too close for XLA to overlap communication"),
        (1.1, True, "it does not fit"),
    ],
)
def test_a_plan_says_how_close_the_memory_is(peak, is_tight, verdict):
    sizes = dict.fromkeys(("params", "optimizer", "temporary", "base"), 0)
    memory = sizes | {"peak": peak * 2**30, "limit": 2**30, "is_tight": is_tight, "levers": []}
    lines = _memory_lines({"memory": memory | {"optimizer_in_host_memory": False}})
    assert lines[-1].endswith(verdict)


@pytest.mark.slow
def test_levers_of_zero_are_what_is_whole():
    """With ZeRO 1, weights in the compute dtype and their gradients."""
    tree = {
        "data": {"global_batch_size": 16, "sequence_length": 256},
        "model": {"vocab_size": 64, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "intermediate_size": 256},
        "train": {"precision": "bfloat16", "microbatch_size": 1}, "mesh": {"fsdp": 4, "data": 1},
    }  # fmt: skip
    build = lambda config: build_spec(config, 64, jax.devices()[:4])
    memory_suggestions = lambda zero: {
        suggestion.setting: suggestion.saves
        for suggestion in find_memory_suggestions(
            build(parse_config(tree | {"mesh": tree["mesh"] | {"zero": zero}})), build
        )
    }
    weights = build(parse_config(tree)).definition.parameter_count
    one, two = memory_suggestions(1), memory_suggestions(2)
    assert one["mesh.zero=3"] == pytest.approx((2 + 3) * weights, rel=0.02)
    assert one["mesh.zero=2"] == pytest.approx(3 * weights, rel=0.02)
    assert two["mesh.zero=3"] == pytest.approx(2 * weights, rel=0.02) and "mesh.zero=2" not in two
    assert not {"mesh.zero=3", "mesh.zero=2"} & {*memory_suggestions(3), *memory_suggestions("auto")}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")  # such programs cannot be loaded
def test_a_plan_that_does_not_fit_names_what_would_save_most():
    chip = CHIPS["h100"]
    plan = lambda *overrides: make_report(
        spec_of(*overrides), lambda device: device.process_index, chip
    )["memory"]  # fmt: skip
    spec_of = lambda *overrides: build_spec(
        config := load_config(ROOT / "configs" / "llama-8b.yaml", list(overrides)), config.model.vocab_size,
        gpu_devices(chip, 16, 8),
    )  # fmt: skip
    tight = plan("train.microbatch_size=4", "model.num_layers=40")
    assert tight["peak"] > tight["limit"] == round(0.92 * chip.memory)
    assert [one["setting"] for one in tight["levers"][:2]] == ["train.remat=full", "train.microbatch_size=2"]
    enough = plan("train.microbatch_size=4", "model.num_layers=40", "train.remat=full")
    assert enough["levers"] == [] and tight["peak"] - enough["peak"] == pytest.approx(
        tight["levers"][0]["saves"], rel=0.1
    )
    offloaded = plan(
        "train.microbatch_size=4", "model.num_layers=40", "train.remat=full", "train.remat_offload=[layer_input]"
    )
    assert enough["peak"] - offloaded["peak"] > 0.5 * 40 * 4 * 8192 * 4096 * 2
    state = plan("train.microbatch_size=4", "model.num_layers=40", "train.remat=full", "optimizer.offload=true")
    assert state["optimizer_in_host_memory"] and state["peak"] < enough["peak"]
