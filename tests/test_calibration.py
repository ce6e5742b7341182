"""Rates that are measured in place of a table's, and the predictions that are made of them."""

import json
import os
import subprocess
import sys

import jax
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError
from jaxmnt.plan.calibration import Calibration, check_calibration, read_calibration, summary, to_text
from jaxmnt.plan.chips import CHIPS
from jaxmnt.plan.rates import GRADIENT, WITHIN_HOST, Curve, Rates, rates_of
from jaxmnt.preflight.calibrate import Measurement, calibrate, fit_collective

H100 = CHIPS["h100"]
SIZES = (64.0, 256.0, 4096.0)
CURVE = Curve(SIZES, tuple(float(place + 1) for place in range(27)))
sizes = st.floats(1.0, 1e6)


def test_a_curve_goes_through_what_was_measured():
    places = [(m, n, k) for m in SIZES for n in SIZES for k in SIZES]
    assert [CURVE.interpolate(*place) for place in places] == pytest.approx(CURVE.rates)
    assert CURVE.interpolate(128, 64, 64) == pytest.approx(
        (CURVE.interpolate(64, 64, 64) + CURVE.interpolate(256, 64, 64)) / 2
    )
    assert CURVE.interpolate(1, 1e9, 1024) == CURVE.interpolate(64, 4096, 1024)  # beyond the ends, as there


@given(sizes, sizes, sizes, st.floats(1.0, 10.0))
def test_a_curve_lies_between_what_was_measured(m, n, k, more):
    """And rises where that does."""
    assert 1 <= CURVE.interpolate(m, n, k) <= 27 + 1e-9
    assert CURVE.interpolate(m, n, k * more) >= CURVE.interpolate(m, n, k) - 1e-9


def sent(start, step, rate, groups=(2, 8)):
    return [
        Measurement(
            size - 1, payload * (size - 1) / size, start + step * (size - 1) + payload * (size - 1) / size / rate
        )
        for size in groups
        for payload in (1 << 14, 1 << 20, 1 << 26)
    ]


@given(st.floats(1e-7, 1e-2), st.floats(1e-8, 1e-3), st.floats(1e7, 1e12))
def test_what_a_collective_takes_is_found_again(start, step, rate):
    told = sent(start, step, rate)
    a, b, c = fit_collective(told)
    for one in told:
        assert a + b * one.steps + one.bytes / c == pytest.approx(one.seconds, rel=1e-3)


def test_a_step_of_a_known_length_is_taken_from_the_start():
    """Of groups of one size; no more than there is."""
    told = sent(1e-4, 0.0, 1e9, groups=(8,))
    start, step, rate = fit_collective(told, 1e-5)
    assert (start, step, rate) == pytest.approx((3e-5, 1e-5, 1e9))
    assert fit_collective(told, 1e-3)[:2] == pytest.approx((0.0, 1e-4 / 7))


@pytest.mark.parametrize("difference", [-1e-5, 0.0, 2e-6])
def test_a_difference_that_is_too_small_makes_nothing_free(difference):
    """Of two loops of half a millisecond: one of the collectives between was as good as not there."""
    told = [one._replace(error=5e-5) for one in sent(1e-4, 0.0, 2e9, groups=(2,))]
    start, _, rate = fit_collective([told[0]._replace(seconds=difference), *told[1:]])
    assert 1e-5 < start < 1e-4 and rate == pytest.approx(2e9, rel=0.05)


@given(st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=3))
def test_nothing_is_below_zero(seconds):
    """Whatever was measured, also when more bytes took less time."""
    told = [Measurement(1, payload, took) for payload, took in zip((1e4, 1e6, 1e8), seconds, strict=True)]
    start, step, rate = fit_collective(told)
    assert start >= 0 and step == 0 and rate > 0  # with one size of groups, nothing is known of a step


def test_measured_rates_count_instead_of_the_tables():
    table = rates_of(H100)
    found = Calibration.model_validate_json(json.dumps(measured(H100.kind))).rates(table)
    assert found.product_seconds(4096, 4096, 4096, "bfloat16") == pytest.approx(2 * 4096**3 / 27)
    assert found.product_seconds(4096, 4096, 4096, "float8") == table.product_seconds(4096, 4096, 4096, "float8")
    assert found.memory == 100 and found.instruction == 0.5
    assert found.ring_seconds("all-gather", 800, [8]) == pytest.approx(1 + 7 * 0.1 + 800 * 7 / 8 / 50)
    assert found.ring_seconds("all-gather", 800, [1, 1]) == table.ring_seconds(
        "all-gather", 800, [1, 1]
    )  # what lies between hosts
    assert found.attention == table.attention


def test_gradients_have_their_own_rate():
    curve, slower = CURVE, Curve(SIZES, (0.5,) * 27)
    rates = Rates(
        products={}, attention=1, memory=1, within_host=1, between_hosts=1, to_host=1,
        curves={("float32", ""): curve, ("float32", GRADIENT): slower},
    )  # fmt: skip
    assert rates.product_seconds(64, 64, 64, "float32", gradient=True) == 2 * rates.product_seconds(
        64, 64, 64, "float32"
    )


def measured(kind, **changes):
    gather = {"kind": "all-gather", "place": WITHIN_HOST, "start": 1.0, "step": 0.1, "rate": 50.0}
    return {
        "kind": kind, "devices": 8, "hosts": 1, "date": "2026-01-01", "software": {},
        "products": [{"dtype": "bfloat16", "gradient": False, "sizes": SIZES, "rates": CURVE.rates}],
        "memory": 100.0, "instruction": 0.5, "page_faults": 0.0, "collectives": [gather],
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["preflight --calibrate", "JSON"]),
        (json.dumps(measured("cpu", memory=-1)), ["memory", "greater than 0"]),
        (json.dumps(measured("cpu", format=2)), ["another version", "format 2"]),
        (json.dumps(measured("cpu", more=1)), ["more"]),
        (json.dumps(measured("cpu", products=[{"dtype": "float32", "gradient": False, "sizes": [1], "rates": []}])),
         ["another version"]),
        (None, ["cannot be read"]),
    ],
)  # fmt: skip
def test_a_file_that_is_no_calibration_is_refused(tmp_path, text, words):
    file = tmp_path / "rates.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_calibration(file)
    for word in ["--calibration", str(file), *words]:
        assert word in str(error.value)


def test_a_calibration_of_something_else_is_refused(tmp_path):
    found = Calibration.model_validate_json(json.dumps(measured("cpu")))
    with pytest.raises(ConfigError, match="was measured on cpu, and the plan is for NVIDIA H100"):
        check_calibration(found, tmp_path, H100, 1, 8)
    with pytest.raises(ConfigError, match="no collectives between hosts"):
        check_calibration(found, tmp_path, None, 2, 8)
    check_calibration(found, tmp_path, None, 1, 8)
    on_gpus = Calibration.model_validate_json(json.dumps(measured(H100.kind)))
    check_calibration(on_gpus, tmp_path, H100, 16, 128)  # the table says what lies between hosts


@pytest.mark.slow
def test_devices_are_measured(tmp_path):
    """With little of each, on the virtual devices of this process."""
    from jaxmnt.preflight.calibrate import ON_CPU

    little = ON_CPU._replace(
        products=(("float32", (16, 64)),),
        max_product_flops=1e6,
        min_program_flops=1e6,
        payloads=(1 << 12, 1 << 14),
        layer_shapes=((256, 64, 96),),
        work_width=16,
        temporary_bytes=1 << 26,
    )
    found = calibrate(Identity(process_id=0, processes=1, coordinator=None), "2026-01-01", little)
    assert found is not None and found.devices == jax.device_count() and found.hosts == 1
    file = tmp_path / "rates.json"
    file.write_text(to_text(found))
    assert read_calibration(file) == found
    assert {(one.dtype, one.gradient) for one in found.products} == {("float32", False), ("float32", True)}
    assert {(one.kind, one.place) for one in found.collectives} == {
        (kind, WITHIN_HOST) for kind in ("all-gather", "all-reduce", "reduce-scatter", "collective-permute")
    }
    rates = found.rates(None)
    assert rates.ring_seconds("all-gather", 1e6, [8]) > rates.ring_seconds("all-gather", 1e3, [8]) > 0
    assert rates.page_fault_seconds(1 << 26) > rates.page_fault_seconds(1 << 25) == 0  # the C library keeps half of it
    assert "memory" in summary(found) and "within hosts" in summary(found)


def of_a_cpu():
    collectives = [
        {"kind": kind, "place": WITHIN_HOST, "start": 1e-3, "step": 0.0, "rate": 1e9}
        for kind in ("all-gather", "reduce-scatter", "all-reduce")
    ]
    products = [{"dtype": "float32", "gradient": False, "sizes": [64], "rates": [1e10]}]
    return json.dumps(measured("cpu", products=products, memory=1e10, instruction=0, collectives=collectives))


def test_a_cpu_is_planned_for_by_what_it_attains(tiny_file, tmp_path):
    """A plan has a prediction, in which communication along the mesh's axis is counted."""
    file = tmp_path / "rates.json"
    file.write_text(of_a_cpu())
    done = subprocess.run(
        [sys.executable, "-m", "jaxmnt.train", "--config", str(tiny_file), "--dry-run", "--devices", "2", "--json",
         "--calibration", str(file), "mesh.data=1", "mesh.fsdp=2"],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | {"JAX_NUM_CPU_DEVICES": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    times = sum(one["times"] for one in plan["collectives"])
    exposed = plan["prediction"]["exposed_seconds"]
    assert times * 1e-3 <= exposed <= times * 1e-3 + 1.0
    flops = plan["timeline"]["flops"]
    assert plan["prediction"]["work_seconds"] >= flops / 1e10


@pytest.mark.exhaustive
def test_two_processes_are_measured_together(tiny_file, tmp_path):
    file = tmp_path / "rates.json"
    done = subprocess.run(
        [sys.executable, "-m", "jaxmnt.launch", "local", "--processes", "2", "--devices-per-process", "1",
         "--cores-per-process", "1", "--preflight", "--", "--config", str(tiny_file), "--calibrate", str(file)],
        capture_output=True, text=True, cwd=ROOT, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = read_calibration(file)
    assert (found.devices, found.hosts) == (2, 1) and str(file) in done.stdout
    assert {one.place for one in found.collectives} == {WITHIN_HOST}  # both are on this machine
    check_calibration(found, file, None, 1, 2)
