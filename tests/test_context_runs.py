"""Whole runs with divided rows (`mesh.context`): they do what runs with whole rows do, on any number of processes."""

import json

import jax
import numpy as np
import pytest
from conftest import check_legs, check_same_checkpoints, command, events, losses, metrics

from jaxmnt.api import load_run
from jaxmnt.train import train

ROWS = ("data.document_mask=true", "model.num_kv_heads=2", "model.dropout=0.1")


@pytest.mark.slow
def test_a_run_with_divided_rows_does_what_others_do(tiny, tmp_path):
    """Evaluation, samples, dropout, a loss by dotted path, the noise scale, compared replicas; and it resumes."""
    settings = (
        *ROWS, "train.steps=6", "train.eval_every=3", "telemetry.samples=[ab]", "telemetry.sample_tokens=5",
        "train.loss=losses.entropy", "telemetry.noise_scale=true", "train.compare_replicas_every=2",
    )  # fmt: skip
    whole, divided, parts = (tmp_path / name for name in ("whole", "divided", "parts"))
    train(tiny(*settings, f"run.dir={whole}", "mesh.data=2"), devices=jax.devices()[:2])
    mesh = ("mesh.data=2", "mesh.context=4")
    train(tiny(*settings, f"run.dir={divided}", *mesh))

    for kind, fields in (("train", ("loss", "grad_norm")), ("eval", ("loss",))):
        records = [[[line[field] for field in fields] for line in metrics(run, kind)] for run in (divided, whole)]
        np.testing.assert_allclose(*records, rtol=1e-5)
    squares = [[line["gradient_squares"] for line in metrics(run)] for run in (divided, whole)]
    for one, other in zip(*squares, strict=True):  # without those of scales, which other devices have not summed
        assert one == pytest.approx(other, rel=0.02)
    digests = [[line["batch_digest"] for line in metrics(run)] for run in (divided, whole)]
    assert digests[0] == digests[1]
    texts = [[event["samples"] for event in events(run, "samples")] for run in (divided, whole)]
    assert texts[0] == texts[1] and len(texts[0]) == 2
    assert [len(events(run, "replicas_differ")) for run in (divided, whole)] == [0, 0]

    train(tiny(*settings, f"run.dir={parts}", *mesh, "train.stop_after=3"))
    train(tiny(*settings, f"run.dir={parts}", *mesh))
    assert losses(parts) == losses(divided)
    check_same_checkpoints(parts, divided)


@pytest.mark.slow
def test_a_run_moves_over_meshes_with_and_without_divided_rows(tiny_file, tmp_path):
    """Each leg restores what another mesh saved. All 20 steps are those of one device. Texts have the same scores."""
    legs = [
        (2, "mesh.context=4 mesh.fsdp=2", 7),
        (1, "mesh.fsdp=8", 13),
        (4, "mesh.context=2 mesh.model=2 mesh.pipeline=2 train.microbatch_size=4 mesh.allow_split_hosts=true", None),
    ]
    run = check_legs(tiny_file, tmp_path, ROWS, legs)

    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("ab cd", "a" * 50, "bcd")))
    score = ("jaxmnt.score", "--run", str(run), "--input", str(lines))
    scores = []
    for mesh in ((), ("mesh.data=1", "mesh.context=4")):
        result = command(*score, *mesh, devices=4 if mesh else 1)
        assert result.returncode == 0, result.stderr
        scores.append([json.loads(line)["log_likelihood"] for line in result.stdout.splitlines()])
    np.testing.assert_allclose(*scores, rtol=1e-5)
    tokens = np.arange(22).reshape(2, 11)  # a length that does not divide
    logits = [load_run(run, mesh=mesh)(tokens) for mesh in ({}, {"context": 4})]
    np.testing.assert_allclose(*logits, atol=1e-5)
    refused = command(
        "jaxmnt.generate", "--run", str(run), "--prompt", "ab", "mesh.data=1", "mesh.context=2", devices=2
    )
    assert refused.returncode == 2 and "mesh.context: generation needs whole rows" in refused.stderr


@pytest.mark.slow
def test_steps_with_divided_rows_are_taken_again(tiny_file):
    mesh = (*ROWS, "mesh.data=1", "mesh.context=2", "train.steps=10")
    run = command("jaxmnt.train", "--config", str(tiny_file), *mesh, devices=2)
    assert run.returncode == 0, run.stderr
    again = command("jaxmnt.train", "--config", str(tiny_file), *mesh, "--replay", "5:10", devices=2)
    assert again.returncode == 0 and "state of step 10: the same, bit for bit" in again.stdout, again.stdout
