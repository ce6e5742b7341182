"""Reading a model of Hugging Face: jaxmnt beside transformers and other ways to read the same files, in one run.

    python benchmarks/huggingface.py --reference-python ENV/bin/python --dir /dev/shm/model

Makes a model of random bfloat16 weights (`--preset`, default llama3.2-1b) with transformers' names, in files of
`--file-gb`. Then each side reads it in a process of its own, in turn, `--rounds` times, and touches every number:

    jaxmnt         onto this machine's devices, as float32 parameters, as run.init_from does
    transformers   `from_pretrained` in float32 (--reference-python may be of another environment)
    slices         safetensors' own slices, whole tensors in bfloat16, and nothing made of them
    orbax          Orbax's SafetensorsLayout, in bfloat16, in the files' shapes

Seconds are those after imports. `peak` is the process' largest resident memory over that before. For jaxmnt,
`over_devices` is the peak less what its devices hold in the end, as a share of the largest file. The second table is of
`--processes` processes with mesh.fsdp over them: how many bytes they read together, as a share of all tensors.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("jaxmnt", "transformers", "slices", "orbax")


def make(folder: Path, preset: str, file_gb: float) -> None:
    """Writes the model, tensor by tensor."""
    import numpy as np

    from jaxmnt.config.load import parse_config
    from jaxmnt.huggingface.config import write_config
    from jaxmnt.huggingface.export import begin_file, divide_into_files
    from jaxmnt.huggingface.tensors import parts_of
    from jaxmnt.models.contract import define
    from jaxmnt.models.registry import build_family

    model = parse_config({"model": {"preset": preset}}).model
    assert model.vocab_size
    parts, rng = parts_of(define(build_family(model, model.vocab_size))), np.random.default_rng(0)
    folder.mkdir(parents=True)
    tree = write_config(model, {"max_position_embeddings": 2048}) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(tree))
    dtype, weights = np.dtype("bfloat16"), {}
    for file, works in divide_into_files(parts, 2, int(file_gb * 1e9)).items():
        tensors = [part for work in works for name in work.parameters for part in parts[name][work.begin : work.end]]
        places = begin_file(folder / file, tensors, dtype)
        for part in tensors:
            weights[part.name] = file
            bits = rng.integers(0, 2**16, int(np.prod(part.tensor_shape)), np.uint16)
            numbers = ((bits & 0x807F) | 0x3C00).view(dtype)  # of about a hundredth, either sign
            with (folder / file).open("rb+") as opened:
                opened.seek(places[part.name])
                opened.write(numbers.tobytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))


def read_jaxmnt(folder: Path) -> Any:
    import jax

    from jaxmnt.config.load import parse_config
    from jaxmnt.distributed.identity import Identity
    from jaxmnt.huggingface.config import read_config
    from jaxmnt.huggingface.load import load_parameters
    from jaxmnt.training.build import inference_spec
    from jaxmnt.training.state import abstract_state

    tree = json.loads((folder / "config.json").read_text())
    config = parse_config({"model": read_config(tree, "config.json"), "train": {"precision": "float32"}})
    assert config.model.vocab_size
    spec = inference_spec(config, config.model.vocab_size)
    jax.block_until_ready(jax.numpy.zeros(3))

    def read() -> int:
        found = load_parameters(folder, spec.definition, abstract_state(spec)["params"], Identity())
        return sum(leaf.nbytes for leaf in jax.tree.leaves(jax.block_until_ready(found.params)))

    return read


def read_transformers(folder: Path) -> Any:
    import torch
    import transformers

    def read() -> int:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        total = sum(float(parameter.sum()) for parameter in model.parameters())
        assert total == total
        return sum(parameter.nbytes for parameter in model.parameters())

    return read


def read_slices(folder: Path) -> Any:
    from safetensors import safe_open

    from jaxmnt.huggingface.folder import DTYPES

    def read() -> int:
        size = 0
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "numpy") as opened:
                arrays = [opened.get_slice(name)[:] for name in sorted(opened.keys())]
            assert {array.dtype for array in arrays} <= {*DTYPES.values()}
            size += sum(array.nbytes for array in arrays)
        return size

    return read


def read_orbax(folder: Path) -> Any:
    import jax
    from orbax.checkpoint import v1 as ocp

    def read() -> int:
        size = 0
        for path in sorted(folder.glob("*.safetensors")):
            with ocp.Context(checkpoint_layout=ocp.options.CheckpointLayout.SAFETENSORS):
                arrays = jax.block_until_ready(ocp.load(str(path)))
            size += sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
        return size

    return read


def child(side: str, folder: Path) -> None:
    """One reading, told as JSON."""
    read = {"jaxmnt": read_jaxmnt, "transformers": read_transformers, "slices": read_slices, "orbax": read_orbax}[side](
        folder
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = memory("VmRSS")
    started = time.perf_counter()
    size = read()
    seconds, peak = time.perf_counter() - started, memory("VmHWM") - before
    print(json.dumps({"side": side, "seconds": seconds, "peak_mib": peak, "held_mib": size / 2**20}))


def memory(name: str) -> float:
    """MiB of this process, by the kernel's name."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def together(folder: Path, processes: int, work: Path) -> dict[str, Any]:
    """What several processes of a run read."""
    from jaxmnt.huggingface.config import read_config

    settings = read_config(json.loads((folder / "config.json").read_text()), "config.json")
    settings["rope_scaling"] = settings.get("rope_scaling") or {}
    tree = {
        "run": {"dir": str(work / "run"), "init_from": f"hf:{folder}"},
        "data": {"synthetic": 1024, "global_batch_size": processes, "sequence_length": 8},
        "model": settings,
        "train": {"steps": 2, "stop_after": 1, "precision": "float32", "params_dtype": "bfloat16", "remat": "full"},
        "optimizer": {"frozen": ["layers.*", "norm.*"], "warmup_steps": 1},
        "checkpoint": {"every_steps": 0},
        "mesh": {"fsdp": processes},
    }
    (work / "config.yaml").write_text(json.dumps(tree))
    command = [sys.executable, "-m", "jaxmnt.launch", "local", "--processes", str(processes), "--"]
    subprocess.run([*command, "--config", str(work / "config.yaml")], check=False, cwd=ROOT, capture_output=True)
    told = []
    for process in range(processes):
        lines = (work / "run" / "events" / f"{process}.jsonl").read_text().splitlines()
        told += [record for record in map(json.loads, lines) if record["kind"] == "restore"]
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    read = [record["bytes"] for record in told]
    return {"processes": processes, "read_mib": [one / 2**20 for one in read], "of_the_files": sum(read) / size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference-python")
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--preset", default="llama3.2-1b")
    parser.add_argument("--file-gb", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    if options.child:
        return child(options.child[0], Path(options.child[1]))
    base = options.dir or Path(tempfile.mkdtemp(prefix="jaxmnt-hf-"))
    folder = base / "model"
    if not folder.exists():
        make(folder, options.preset, options.file_gb)
    sides, found = options.sides.split(","), {}
    for number in range(options.rounds):
        for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
            python = options.reference_python if side == "transformers" else sys.executable
            if python is None:
                continue
            done = subprocess.run(
                [python, __file__, "--child", side, str(folder)], check=True, capture_output=True, text=True, cwd=ROOT
            )
            one = json.loads(done.stdout.splitlines()[-1])
            found.setdefault(side, []).append(one)
            print(json.dumps(one), flush=True)
    largest = max(path.stat().st_size for path in folder.glob("*.safetensors")) / 2**20
    median = {side: statistics.median(one["seconds"] for one in several) for side, several in found.items()}
    told: dict[str, Any] = {"seconds": median, "largest_file_mib": largest}
    if "jaxmnt" in found:
        over = [(one["peak_mib"] - one["held_mib"]) / largest for one in found["jaxmnt"]]
        told["over_devices"] = max(over)
    if "jaxmnt" in found and "transformers" in found:
        pairs = zip(found["jaxmnt"], found["transformers"], strict=True)
        told["over_transformers"] = [one["seconds"] / other["seconds"] for one, other in pairs]
    if options.processes > 1:
        work = Path(tempfile.mkdtemp(prefix="jaxmnt-hf-run-"))
        told["together"] = together(folder, options.processes, work)
        shutil.rmtree(work)
    print(json.dumps(told))
    if options.dir is None:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
