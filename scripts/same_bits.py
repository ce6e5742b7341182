#!/usr/bin/env python3
"""scripts/same_bits.py BEFORE [AFTER]: trains 20 steps with the code of two commits or folders, and compares all bits.

For a change that must not change a number: losses, gradient norms, digests of the batches and of the last checkpoint's
arrays, on one device and on meshes of every kind, with each part of the step that a change may rewrite. BEFORE and
AFTER are commits, or folders with jaxmnt/ and examples/ in them; AFTER is this repository's working tree by default.
The user's family and loss are those of AFTER's examples, in both. Ends with 1 if anything differs.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOAT8 = ["train.precision=float8", "train.float8_least=16"]
WINDOWS = ["model.sliding_window=16", "model.sliding_window_pattern=2"]
WAYS = {
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
    "pipeline 2 x fsdp 2, ZeRO 1": ["mesh.pipeline=2", "mesh.fsdp=2", "mesh.zero=1"],
    "fsdp 2, ZeRO 2, dots": ["mesh.fsdp=2", "mesh.zero=2", "train.remat=dots"],
    "fsdp 2, prefetch, dropout": ["mesh.fsdp=2", "mesh.prefetch=true", "model.dropout=0.1"],
    "fsdp 2 x model 2, ring, prefetch": [
        "mesh.fsdp=2", "mesh.model=2", "model.overlap=ring", "mesh.prefetch=true",
    ],
    "pipeline 2 x model 2, rows": [
        "mesh.pipeline=2", "mesh.model=2", "model.overlap=rows", "train.microbatch_size=2",
    ],
    "fsdp 2 x model 2, float8": ["mesh.fsdp=2", "mesh.model=2", *FLOAT8],
    "fsdp 2, prefetch, float8": ["mesh.fsdp=2", "mesh.prefetch=true", *FLOAT8],
    "packed rows, windows": ["model.family=gemma3", "data.rows=packed", *WINDOWS],
    "pipeline 2 x fsdp 2, packed, windows": [
        "mesh.pipeline=2", "mesh.fsdp=2", "model.family=gemma3", "data.rows=packed", *WINDOWS,
    ],
    "fsdp 2 x model 2, Muon": [
        "mesh.fsdp=2", "mesh.model=2", 'optimizer.rules=[{pattern: "layers.mlp.*", kind: muon}]',
    ],
    "fsdp 2, frozen, tied": [
        "mesh.fsdp=2", 'optimizer.frozen=["layers.mlp.*"]', "model.tie_embeddings=true", "model.num_kv_heads=2",
    ],
    "pipeline 2, uneven, gpipe": ["mesh.pipeline=2", "pipeline.layers=[1, 3]", "pipeline.schedule=gpipe"],
    "GPT-2, learned positions": ["model.family=gpt2", "model.max_positions=64", "mesh.model=2"],
    "a user's family": ["model.family=routed_scales.RoutedLlama", "mesh.data=2", "mesh.fsdp=2"],
    "a user's family, pipeline 2": ["model.family=routed_scales.RoutedLlama", "mesh.pipeline=2"],
    "a user's loss": ["train.loss=label_smoothing.loss", "mesh.fsdp=2", "mesh.model=2"],
    "loss in chunks, no clipping": [
        "mesh.data=2", "train.loss_chunk_mib=1", "model.vocab_size=8192", "optimizer.clip_norm=null",
    ],
    "noise scale, other sets": [
        "mesh.data=2", "telemetry.noise_scale=true", "data.eval_sets={other: {path: DATA}}",
    ],
}  # fmt: skip
SETTINGS = [
    "data.global_batch_size=8", "data.sequence_length=64", "data.log_digest=true", "model.hidden_size=32",
    "model.num_layers=4", "model.num_heads=4", "train.steps=20", "train.microbatch_size=1", "train.eval_every=10",
    "optimizer.learning_rate=1e-2", "optimizer.warmup_steps=5", "checkpoint.every_steps=20",
]  # fmt: skip
SIZES = ("mesh.data", "mesh.pipeline", "mesh.fsdp", "mesh.model")
"""Settings whose product is the number of devices."""

NUMBERS = (
    "kind", "step", "loss", "grad_norm", "learning_rate", "tokens", "batch_digest", "sources", "epochs", "bad_steps",
    "model", "gradient_squares",
)  # fmt: skip
"""What a line of metrics says about the training itself."""


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2:
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        before, after = (_tree(text, work) for text in [*arguments, str(ROOT)][:2])
        parts = work / "parts"
        parts.mkdir()
        for module in ("model_family/routed_scales.py", "loss/label_smoothing.py"):
            shutil.copy(after / "examples" / module, parts)
        data = work / "data"
        source = ["--input", str(before / "jaxmnt"), "--suffix", ".py"]
        _run(before, parts, work, 1, "prepare", *source, "--output", str(data))
        different = [name for name in WAYS if not _same(name, before, after, parts, data, work)]
    print(f"different: {', '.join(different)}" if different else "The same bits in every way.")
    return int(bool(different))


def _tree(text: str, work: Path) -> Path:
    """Returns the folder with the code; a commit is written into a new one."""
    if (Path(text) / "jaxmnt").is_dir():
        return Path(text).resolve()
    folder = work / text.replace("/", "_")
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", text], check=True, capture_output=True).stdout
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder


def _same(name: str, before: Path, after: Path, parts: Path, data: Path, work: Path) -> bool:
    """Returns whether both codes come to the same numbers in one way. They train side by side."""
    folder = work / "runs" / "".join(letter if letter.isalnum() else "-" for letter in name)
    with ThreadPoolExecutor(2) as pool:
        train = lambda tree, number: _trained(tree, parts, folder / str(number), WAYS[name], data)
        results = list(pool.map(train, (before, after), (0, 1)))
    is_same = results[0] == results[1]
    print(f"{name:40}{'the same' if is_same else 'DIFFERENT'}", flush=True)
    return is_same


def _trained(tree: Path, parts: Path, folder: Path, way: list[str], data: Path) -> list[object]:
    """Returns what must not change: every number of every step, and the digest of each array at the end."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("{}")
    run = folder / "run"
    devices = 1
    for setting in way:
        key, _, size = setting.partition("=")
        devices *= int(size) if key in SIZES else 1
    way = [setting.replace("DATA", str(data)) for setting in way]
    # Versions before this key evaluate on all that is held out.
    knows_limit = "eval_tokens" in (tree / "jaxmnt" / "config" / "schema.py").read_text()
    whole = ["train.eval_tokens=null"] if knows_limit else []
    settings = [*SETTINGS, *whole, *way, f"data.path={data}", f"run.dir={run}"]
    _run(tree, parts, folder, devices, "train", "--config", "config.yaml", *settings)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    manifest = json.loads((run / "checkpoints" / "20" / "jaxmnt.json").read_text())
    arrays = {name: array["content"] for name, array in sorted(manifest["manifest"]["arrays"].items())}
    assert arrays and len(lines) == 22, [line["kind"] for line in lines]
    return [*({name: line.get(name) for name in NUMBERS} for line in lines), arrays]


def _run(tree: Path, parts: Path, folder: Path, devices: int, command: str, *arguments: str) -> None:
    environment = dict(
        os.environ, PYTHONPATH=f"{tree}:{parts}", JAX_NUM_CPU_DEVICES=str(devices), JAX_PLATFORMS="cpu"
    )  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-m", f"jaxmnt.{command}", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if result.returncode:
        raise SystemExit(
            f"jaxmnt.{command} {' '.join(arguments)} of {tree} ended with {result.returncode}:\n{result.stderr}"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
