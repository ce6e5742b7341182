"""`python -m jaxmnt.check`: what differs between meshes and one device is found, and named."""

import pytest
import test_parallel
from conftest import ROOT, command, in_tiers

from jaxmnt.check.compare import Checker
from jaxmnt.check.meshes import trials


def found_in(family, name="fsdp 2 × model 2"):
    """The differences on a mesh, and those of generation."""
    one_device, *meshes = trials(test_parallel.config(model={"family": family}), 4)
    checker = Checker(one_device, 60)
    (trial,) = [trial for trial in meshes if trial.name == name]
    return checker.differences(trial), checker.decoding_differences()


FAULTS = {
    "WithoutShare": ("loss", "as if extra counted 2 times: is share_of or a sum over devices missing?"),
    "PartialGradient": ("gradient of layers.gain", ""),
    "WrongAxis": ("gradient of layers.attention.query_bias", ""),
}


@pytest.mark.parametrize("family", in_tiers({1}, list(FAULTS)))
def test_a_planted_fault_is_named(family):
    differences, decoding = found_in(f"faulty_families.{family}")
    name, remark = FAULTS[family]
    found = {difference.name: difference for difference in differences}
    assert name in found and remark in found[name].remark
    gradients = [difference.name for difference in differences if difference.name.startswith("gradient")]
    if name in gradients:
        assert gradients[0] == name, "the largest error comes first"
    if family == "PartialGradient":
        assert [difference.name for difference in differences] == [name]
    assert not decoding


@pytest.mark.slow
def test_a_decode_that_differs_is_found():
    differences, decoding = found_in("faulty_families.ForgetfulDecode")
    assert not differences
    assert "a pass over the whole text finds" in decoding[0].remark


@pytest.mark.slow
def test_a_right_family_is_the_same():
    differences, decoding = found_in("qwen2")
    assert not differences and not decoding


@pytest.mark.slow
def test_a_bias_of_distances_is_the_same():
    """With heads on several devices, rows on several devices, and a cache."""
    differences, decoding = found_in("biased_families.Alibi")
    assert not differences and not decoding


@pytest.mark.slow
def test_the_command(tmp_path):
    """On the example, whose data, loss and optimizer are its own, and with a fault."""
    config = ROOT / "examples" / "digits" / "digits.yaml"
    paths = f"{ROOT / 'examples' / 'digits'}:{ROOT / 'tests'}"
    right = command("jaxmnt.check", "--config", str(config), "--devices", "4", PYTHONPATH=paths)
    assert right.returncode == 0, right.stdout + right.stderr
    assert right.stdout.count("the same as one device") == 6
    wrong = command(
        "jaxmnt.check", "--config", str(config), "--devices", "2", "model.family=faulty_families.WithoutShare",
        "model.options={}", PYTHONPATH=paths,
    )  # fmt: skip
    assert wrong.returncode == 1 and "DIFFERS" in wrong.stdout, wrong.stdout + wrong.stderr
    odd = command("jaxmnt.check", "--config", str(config), "--devices", "3", PYTHONPATH=paths)
    assert odd.returncode == 2 and "--devices: must be an even number" in odd.stderr
