#!/usr/bin/env python3
"""scripts/same_bits.py BEFORE [AFTER]: trains 20 steps with the code of two commits or folders, and compares all bits.

For a change that must not change a number: losses, gradient norms, digests of the batches and of the last checkpoint's
arrays, on one device and on meshes of every kind. BEFORE and AFTER are commits, or folders with jaxmnt/ in them; AFTER
is this repository's working tree by default. Ends with 1 if anything differs.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MESHES = {
    "one device": [],
    "data 2": ["mesh.data=2"],
    "fsdp 2": ["mesh.fsdp=2"],
    "model 2": ["mesh.model=2"],
    "pipeline 2, 1f1b": ["mesh.pipeline=2"],
    "pipeline 2, interleaved": ["mesh.pipeline=2", "pipeline.schedule=interleaved", "pipeline.chunks=2"],
    "data 2 x fsdp 2 x model 2": ["mesh.data=2", "mesh.fsdp=2", "mesh.model=2"],
    "pipeline 2 x fsdp 2, bfloat16, remat": [
        "mesh.pipeline=2", "mesh.fsdp=2", "train.precision=bfloat16", "train.remat=full",
    ],
}  # fmt: skip
SETTINGS = [
    "data.global_batch_size=8", "data.sequence_length=64", "data.log_digest=true", "model.hidden_size=32",
    "model.num_layers=4", "model.num_heads=4", "train.steps=20", "train.microbatch_size=1", "train.eval_every=10",
    "optimizer.learning_rate=1e-2", "optimizer.warmup_steps=5", "checkpoint.every_steps=20",
]  # fmt: skip


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2:
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        before, after = (_tree(text, work) for text in [*arguments, str(ROOT)][:2])
        data = work / "data"
        _run(before, work, 1, "prepare", "--input", str(before / "docs"), "--output", str(data))
        different = [name for name in MESHES if not _same(name, before, after, data, work)]
    print(f"different: {', '.join(different)}" if different else "The same bits on every mesh.")
    return int(bool(different))


def _tree(text: str, work: Path) -> Path:
    """The folder with the code; a commit is written into a new one."""
    if (Path(text) / "jaxmnt").is_dir():
        return Path(text).resolve()
    folder = work / text.replace("/", "_")
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", text], check=True, capture_output=True).stdout
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder


def _same(name: str, before: Path, after: Path, data: Path, work: Path) -> bool:
    """Whether both codes come to the same on one mesh."""
    results = []
    for number, tree in enumerate((before, after)):
        run = work / "runs" / f"{name} {number}".replace(" ", "_")
        config = work / "config.yaml"
        config.write_text("{}")
        devices = 1
        for setting in MESHES[name]:
            section, _, size = setting.partition("=")
            devices *= int(size) if section.startswith("mesh.") else 1
        wanted = [*SETTINGS, *MESHES[name], f"data.path={data}", f"run.dir={run}"]
        _run(tree, work, devices, "train", "--config", str(config), *wanted)
        results.append(_result(run))
    print(f"{name:40}{'the same' if results[0] == results[1] else 'DIFFERENT'}", flush=True)
    return results[0] == results[1]


def _result(run: Path) -> list[object]:
    """What must not change: every number of every step, and the digest of each array at the end."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("kind", "step", "loss", "grad_norm", "learning_rate", "tokens", "batch_digest", "sources")
    manifest = json.loads((run / "checkpoints" / "20" / "jaxmnt.json").read_text())
    arrays = {name: array["content"] for name, array in sorted(manifest["manifest"]["arrays"].items())}
    assert arrays and len(lines) == 22
    return [*({name: line.get(name) for name in names} for line in lines), arrays]


def _run(tree: Path, work: Path, devices: int, command: str, *arguments: str) -> None:
    environment = dict(os.environ, PYTHONPATH=str(tree), JAX_NUM_CPU_DEVICES=str(devices), JAX_PLATFORMS="cpu")
    told = subprocess.run(
        [sys.executable, "-m", f"jaxmnt.{command}", *arguments],
        cwd=work, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if told.returncode:
        raise SystemExit(
            f"jaxmnt.{command} {' '.join(arguments)} of {tree} ended with {told.returncode}:\n{told.stderr}"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
