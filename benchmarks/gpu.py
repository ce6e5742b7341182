"""What a GPU shows, in the order of what is most worth knowing, for a card that is there for half an hour.

    python benchmarks/gpu.py --torch-python ENV/bin/python    on a machine with a GPU; again, until nothing is left
    python benchmarks/gpu.py --rehearse                       all parts on the CPU, tiny: so the first real run works

Each part is a process of its own with a time limit; its result is one line of JSON in `--output` (default
`benchmarks/results/DATE-DEVICE.jsonl`). A part that is there already is not run again, and none is begun that could not
end within `--seconds` (default 570), so a run fits a command of ten minutes: run it again to go on. At the end comes a
table of all results.

The model is Llama 3 8B with as many layers as fit the card, 8,192 tokens a row, random tokens. `torch` is the same
model in PyTorch (torch.compile, flash attention by scaled_dot_product_attention, fused AdamW, bfloat16 autocast), in
turn with jaxmnt, if `--torch-python` names a Python that has it.
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxmnt.plan.chips import CHIPS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
Result = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """The model and the rows of a step."""

    layers: int
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    mlp: int = 14336
    vocab: int = 128256
    length: int = 8192
    rows: int = 2
    steps: int = 12

    def overrides(self, run: Path) -> list[str]:
        return [
            f"run.dir={run}", f"data.synthetic={self.vocab}", f"data.sequence_length={self.length}",
            f"data.global_batch_size={self.rows}", f"train.steps={self.steps}", "optimizer.warmup_steps=1",
            f"model.hidden_size={self.width}", f"model.num_layers={self.layers}", f"model.num_heads={self.heads}",
            f"model.num_kv_heads={self.kv_heads}", f"model.intermediate_size={self.mlp}",
            "checkpoint.every_steps=100000", "telemetry.sinks=[]", "train.log_every=1",
        ]  # fmt: skip


TINY = Shape(layers=2, width=64, heads=4, kv_heads=2, mlp=128, vocab=256, length=64, rows=4, steps=6)
SMALL = Shape(layers=8, width=1024, heads=16, kv_heads=8, mlp=4096, vocab=32768, length=2048, rows=8, steps=200)
TINY_LONG = {**vars(TINY), "steps": 12}


@dataclass(frozen=True)
class Bench:
    """What all parts are given."""

    rehearse: bool
    torch_python: str | None
    folder: Path

    @property
    def memory_gib(self) -> float:
        """Of the GPU."""
        return float(query_gpus("memory.total")[0]) / 1024

    @property
    def shape(self) -> Shape:
        """As many layers as leave half of the card for what backward keeps: 16 bytes a parameter."""
        if self.rehearse:
            return TINY
        parameters = (0.5 * self.memory_gib * 2**30) / 16 - 2 * 128256 * 4096
        return Shape(layers=max(2, int(parameters // 218e6)))

    @property
    def small(self) -> Shape:
        """For what takes many steps."""
        return Shape(**TINY_LONG) if self.rehearse else SMALL


def query_gpus(field: str) -> list[str]:
    """Returns what nvidia-smi says of each GPU of this host. Ends the command where there is none."""
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    result = subprocess.run(query, capture_output=True, text=True) if shutil.which(query[0]) else None
    if result is None or result.returncode:
        sys.exit("nvidia-smi finds no GPU here; --rehearse runs all parts on the CPU")
    return [line.strip() for line in result.stdout.splitlines()]


def plan_target() -> str | None:
    """Returns the name that `--target` has for the GPUs of this host; None if it has none."""
    name = query_gpus("name")[0]
    return next((target for target, chip in CHIPS.items() if chip.kind == name), None)


def train(
    bench: Bench,
    name: str,
    shape: Shape,
    *overrides: str,
    code: int = 0,
    run: Path | None = None,
    environment: dict[str, str] | None = None,
) -> Path:
    """A run as its users start it; its directory."""
    run = run or bench.folder / name
    command = [sys.executable, "-m", "jaxmnt.train", *shape.overrides(run), *overrides]
    config = bench.folder / "empty.yaml"
    config.write_text("{}\n")
    told = subprocess.run(
        [*command, "--config", str(config)], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | (environment or {}),
    )  # fmt: skip
    if told.returncode != code:
        raise RuntimeError(f"{name} ended with {told.returncode}: {told.stderr[-1500:]}")
    return run


def lines(run: Path, name: str = "metrics.jsonl", kind: str = "train") -> list[Result]:
    found = (json.loads(line) for line in (run / name).read_text().splitlines())
    return [line for line in found if line.get("kind") == kind]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run)]


def measured(run: Path) -> Result:
    """The speed of the later steps, and memory beside what was planned."""
    steps = lines(run)[3:]
    middle = lambda name: statistics.median(line[name] for line in steps) if steps[0].get(name) is not None else None
    of = (
        [line["of"] for line in lines(run, "resources.jsonl", "resources")]
        if (run / "resources.jsonl").exists()
        else []
    )
    peaks = [line["device_peak_bytes"]["max"][0] for line in of if "device_peak_bytes" in line]
    [compiled] = lines(run, "events/0.jsonl", "started")[-1:]
    return {
        "tokens_per_second": middle("tokens_per_second"), "step_seconds": middle("step_seconds"), "mfu": middle("mfu"),
        "peak_gib": round(max(peaks) / 2**30, 2) if peaks else None,
        "compile_seconds": compiled["seconds"].get("compile"), "loss": lines(run)[-1]["loss"],
    }  # fmt: skip


def planned(shape: Shape, bench: Bench, *overrides: str) -> float | None:
    """Peak memory by `--dry-run`, in GiB; None for a card that it does not know, or where the plugin is missing."""
    chip = None if bench.rehearse else plan_target()
    if chip is None and not bench.rehearse:
        return None
    target = ["--devices", "1"] if chip is None else ["--target", chip, "--hosts", "1", "--devices-per-host", "1"]
    config = bench.folder / "plan.yaml"
    config.write_text("{}\n")
    command = [
        sys.executable, "-m", "jaxmnt.train", "--config", str(config), "--dry-run", "--json", *target,
        *shape.overrides(bench.folder / "plan"), f"model.vocab_size={shape.vocab}", *overrides,
    ]  # fmt: skip
    told = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    return round(json.loads(told.stdout)["memory"]["peak"] / 2**30, 2) if told.returncode == 0 else None


# -- the parts


def part_versions(bench: Bench) -> Result:
    smi = subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout if not bench.rehearse else ""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    found = {name: version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "list", "--format=json"], capture_output=True, text=True
    ).stdout
    found |= {one["name"]: one["version"] for one in json.loads(listed) if re.match("nvidia-|jax-cuda", one["name"])}
    return {"nvidia_smi": smi, "commit": commit, "packages": found, "python": sys.version.split()[0]}


def part_tests(bench: Bench) -> Result:
    """The tests that need a GPU; for a rehearsal, that they can be collected."""
    more = ["--collect-only"] if bench.rehearse else []
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *more],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    return {
        "exit_code": told.returncode,
        "last_line": told.stdout.strip().splitlines()[-1],
        "output": told.stdout[-6000:],
    }


def part_bfloat16(bench: Bench) -> Result:
    """In turn with PyTorch, if it is there: three rounds each."""
    shape, ours, theirs = bench.shape, [], []
    for number in range(1 if bench.rehearse else 2):
        ours.append(measured(train(bench, f"bfloat16-{number}", shape, "train.precision=bfloat16")))
        if bench.torch_python:
            theirs.append(in_torch(bench, shape))
    rate = lambda rounds: statistics.median(one["tokens_per_second"] for one in rounds)
    return ours[-1] | {
        "layers": shape.layers, "rows": shape.rows, "planned_gib": planned(shape, bench, "train.precision=bfloat16"),
        "torch": theirs[-1] if theirs else None,
        "tokens_per_second_over_torch": round(rate(ours) / rate(theirs), 3) if theirs else None,
    }  # fmt: skip


def part_float8(bench: Bench) -> Result:
    low = ["train.precision=float8", *(["train.float8_least=16"] if bench.rehearse else [])]
    return measured(train(bench, "float8", bench.shape, *low))


def part_packed(bench: Bench) -> Result:
    return measured(train(bench, "packed", bench.shape, "train.precision=bfloat16", "data.rows=packed"))


def part_determinism(bench: Bench) -> Result:
    """Two runs, and one that was stopped: the same losses and the same parameters, the embedding among them."""
    half, shape = f"train.stop_after={bench.small.steps // 2}", bench.small
    low = ("train.precision=bfloat16",)
    one, two = (train(bench, f"same-{name}", shape, *low) for name in ("one", "two"))
    train(bench, "same-parts", shape, *low, half, code=75)
    parts = train(bench, "same-parts", shape, *low)
    return {
        "losses_of_two_runs_equal": losses(one) == losses(two),
        "losses_after_resume_equal": losses(one) == losses(parts),
        "arrays_of_two_runs_that_differ": differing(one, two),
        "arrays_after_resume_that_differ": differing(one, parts),
    }  # fmt: skip


def differing(one: Path, other: Path) -> list[str]:
    """Names of the arrays of the last checkpoints that hold other numbers."""
    digests = []
    for run in (one, other):
        newest = max(
            (path for path in (run / "checkpoints").iterdir() if path.name.isdigit()), key=lambda p: int(p.name)
        )
        digests.append(json.loads((newest / "jaxmnt.json").read_text())["manifest"]["arrays"])
    content = lambda number, name: digests[number].get(name, {}).get("content")
    return sorted(name for name in digests[0] if content(0, name) != content(1, name))


def part_convergence(bench: Bench) -> Result:
    """Losses of 200 steps against float32's, averaged over 20."""
    found, over = {}, 4 if bench.rehearse else 20
    small = ["train.float8_least=16"] if bench.rehearse else []
    for precision in ("float32", "bfloat16", "float8"):
        run = train(bench, f"curve-{precision}", bench.small, f"train.precision={precision}", *small)
        curve = losses(run)
        found[precision] = [sum(curve[at : at + over]) / over for at in range(len(curve) - over + 1)]
    apart = lambda name: max(abs(a / b - 1) for a, b in zip(found[name], found["float32"], strict=True))
    return {
        "bfloat16_apart": apart("bfloat16"),
        "float8_apart": apart("float8"),
        "end": {n: c[-1] for n, c in found.items()},
    }


def part_long(bench: Bench) -> Result:
    length = 128 if bench.rehearse else 32768
    shape = Shape(**{**vars(bench.shape), "length": length, "rows": 1, "steps": 6})
    return measured(train(bench, "long", shape, "train.precision=bfloat16", "train.remat=full"))


def part_remat(bench: Bench) -> Result:
    shape = Shape(**{**vars(bench.shape), "steps": 6})
    policies = {remat: [f"train.remat={remat}"] for remat in ("none", "dots", "full")}
    policies["offload"] = ["train.remat=full", "train.remat_offload=[layer_input]"]
    return {
        name: measured(train(bench, f"remat-{name}", shape, "train.precision=bfloat16", *settings))
        for name, settings in policies.items()
    }


def part_ceilings(bench: Bench) -> Result:
    """What the card attains in the step's own shapes: products, attention, memory."""
    import jax
    import jax.numpy as jnp

    from jaxmnt.models.float8 import Float8, product
    from jaxmnt.models.kernels import attend

    shape, on_gpu = bench.shape, not bench.rehearse
    tokens, head = shape.rows * shape.length, shape.width // shape.heads
    normal = lambda *sizes: jax.random.normal(jax.random.key(0), sizes, jnp.bfloat16)

    def seconds(function: Callable[..., Any], *arguments: Any) -> float:
        compiled = jax.jit(function).lower(*arguments).compile()
        jax.block_until_ready(compiled(*arguments))
        times = []
        for _ in range(3 if bench.rehearse else 20):
            started = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    found: Result = {}
    how = Float8(16, native=on_gpu)
    for name, inputs, outputs in (
        ("query", shape.width, shape.width), ("key", shape.width, shape.kv_heads * head),
        ("gate", shape.width, shape.mlp), ("down", shape.mlp, shape.width), ("head", shape.width, shape.vocab),
    ):  # fmt: skip
        x, w = normal(tokens, inputs), normal(inputs, outputs)
        flops = 2 * tokens * inputs * outputs
        found[f"{name}_tflops"] = flops / seconds(lambda x, w: x @ w, x, w) / 1e12
        if name != "head":
            found[f"{name}_float8_tflops"] = flops / seconds(lambda x, w: product(how, x, w), x, w) / 1e12
    q, k = (normal(shape.rows, shape.length, n, head) for n in (shape.heads, shape.kv_heads))
    kernel = "cudnn" if on_gpu else "blockwise"
    forward = lambda q, k: attend(q, k, k, None, kernel)
    pairs = shape.rows * shape.heads * shape.length**2 / 2
    found["attention_tflops"] = 4 * pairs * head / seconds(forward, q, k) / 1e12
    both = jax.grad(lambda q, k: forward(q, k).astype(jnp.float32).sum(), (0, 1))
    found["attention_both_tflops"] = 14 * pairs * head / seconds(both, q, k) / 1e12
    big = normal(tokens, shape.mlp)
    found["memory_tb_per_second"] = 2 * big.nbytes / seconds(lambda x: x + 1, big) / 1e12
    return found


def part_checkpoint(bench: Bench) -> Result:
    """How long a save holds the steps up, and a second start from a cache of programs."""
    shape = Shape(**{**vars(bench.shape), "steps": 8})
    run = train(bench, "saves", shape, "train.precision=bfloat16", "checkpoint.every_steps=3")
    blocked = [line["blocked_seconds"] for line in lines(run, "events/0.jsonl", "checkpoint_commit")]
    longer = Shape(**{**vars(shape), "steps": 10})
    train(bench, "saves", longer, "train.precision=bfloat16", "--accept-changes")
    starts = lines(run, "events/0.jsonl", "started")
    return {"blocked_seconds": blocked, "starts": [line["seconds"] for line in starts]}


def part_experts(bench: Bench) -> Result:
    """A layer of experts by each kernel against a dense MLP, and a mixture trained by the chosen kernel and by XLA."""
    import expert_layer

    cases = expert_layer.TINY if bench.rehearse else expert_layer.ON_GPU
    width = 64 if bench.rehearse else 768
    mixture = [
        "model.family=qwen3_moe", "model.intermediate_size=null", f"model.expert_size={width}", "model.num_experts=16",
        "model.experts_per_token=4", "train.precision=bfloat16",
    ]  # fmt: skip
    auto, xla = (
        train(bench, f"experts-{kernel}", bench.small, *mixture, f"model.experts_kernel={kernel}")
        for kernel in ("auto", "xla")
    )
    apart = max(abs(a / b - 1) for a, b in zip(losses(auto), losses(xla), strict=True))
    return {
        "layers": [expert_layer.measure(case, 5) for case in cases],
        "mixture": measured(auto), "mixture_by_xla": measured(xla), "losses_apart": apart,
    }  # fmt: skip


def part_context(bench: Bench) -> Result:
    """Attention of each device that shares a row, one after the other, beside attention in whole rows."""
    import divided_rows

    cases = divided_rows.TINY if bench.rehearse else divided_rows.ON_GPU
    return {"cases": [divided_rows.measure(case, 3) for case in cases]}


def part_control_flow(bench: Bench) -> Result:
    """What a condition and a loop of unknown length cost, and products in pieces."""
    import control_flow

    case = control_flow.TINY if bench.rehearse else control_flow.USUAL
    return control_flow.measure(case, 3 if bench.rehearse else 20)


def part_microbatches(bench: Bench) -> Result:
    """Two microbatches side by side, one after another, and side by side with products that may be Triton's."""
    settings = ["train.precision=bfloat16", "train.microbatch_size=1", "train.remat=dots"]
    one_after_another = [*settings, "train.overlap_microbatches=false"]
    side_by_side = [*settings, "train.overlap_microbatches=true"]
    triton = {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true"}
    runs = {
        "one_after_another": train(bench, "microbatches-one", bench.small, *one_after_another),
        "side_by_side": train(bench, "microbatches-two", bench.small, *side_by_side),
        "triton": train(bench, "microbatches-triton", bench.small, *side_by_side, environment=triton),
    }
    apart = max(abs(one - two) for one, two in zip(*map(losses, list(runs.values())[:2]), strict=True))
    return {"losses_apart": apart} | {name: measured(run) for name, run in runs.items()}


def part_lora(bench: Bench) -> Result:
    """Adapters beside a run, all and those of attention, with the memory that was planned; the base is trained for the
    speed and memory of full training."""
    rank = 4 if bench.rehearse else 32
    bfloat16 = "train.precision=bfloat16"
    base = train(bench, "lora-base", bench.small, bfloat16)
    begin = [f"run.init_from={base}", f"lora={{rank: {rank}, alpha: {2 * rank}}}", bfloat16]
    all_linear = train(bench, "lora-all", bench.small, *begin)
    attention = train(bench, "lora-attention", bench.small, *begin, "lora.targets=[layers.attention.*]")
    again = train(bench, "lora-again", bench.small, *begin)
    return {
        "full": measured(base), "full_planned_gib": planned(bench.small, bench, bfloat16),
        "all": measured(all_linear), "all_planned_gib": planned(bench.small, bench, *begin[1:]),
        "attention": measured(attention), "losses_of_two_runs_equal": losses(all_linear) == losses(again),
    }  # fmt: skip


def part_muon(bench: Bench) -> Result:
    """Muon by each set of coefficients, beside AdamW: what its products cost on one card, and how the loss falls."""
    kinds = {"adamw": [], "jordan": ["optimizer.kind=muon"]}
    kinds["polar_express"] = [*kinds["jordan"], "optimizer.muon.coefficients=polar_express"]
    return {
        name: measured(train(bench, f"muon-{name}", bench.small, "train.precision=bfloat16", *settings))
        for name, settings in kinds.items()
    }


PARTS: dict[str, tuple[Callable[[Bench], Result], int]] = {
    "versions": (part_versions, 60),
    "tests": (part_tests, 420),
    "bfloat16": (part_bfloat16, 540),
    "float8": (part_float8, 240),
    "packed": (part_packed, 240),
    "experts": (part_experts, 300),
    "context": (part_context, 120),
    "control_flow": (part_control_flow, 120),
    "microbatches": (part_microbatches, 300),
    "lora": (part_lora, 300),
    "muon": (part_muon, 240),
    "determinism": (part_determinism, 400),
    "convergence": (part_convergence, 400),
    "long": (part_long, 240),
    "remat": (part_remat, 400),
    "ceilings": (part_ceilings, 180),
    "checkpoint": (part_checkpoint, 300),
}
"""In order, with the seconds that each may take."""


# -- the same model in PyTorch


def in_torch(bench: Bench, shape: Shape) -> Result:
    assert bench.torch_python is not None
    command = [
        bench.torch_python,
        str(HERE / "gpu_torch.py"),
        json.dumps(vars(shape)),
        *(["--cpu"] if bench.rehearse else []),
    ]
    told = subprocess.run(command, capture_output=True, text=True)
    if told.returncode:
        raise RuntimeError(f"torch ended with {told.returncode}: {told.stderr[-1500:]}")
    result: Result = json.loads(told.stdout.splitlines()[-1])
    return result


# -- running parts


def main() -> None:
    options = parse()
    if options.part:
        with tempfile.TemporaryDirectory() as folder:
            function, _ = PARTS[options.part]
            print(json.dumps(function(Bench(options.rehearse, options.torch_python, Path(folder)))))
        return
    output = options.output or default_output(options.rehearse)
    done = {line["part"]: line for line in read(output) if line["ok"]}
    end, left = time.monotonic() + options.seconds, []
    for name in options.only or PARTS:
        limit = PARTS[name][1]
        if name in done and not options.rehearse:
            continue
        if time.monotonic() + limit > end and left + list(done):
            left.append(name)
            continue
        line = run_part(name, min(limit, max(30.0, end - time.monotonic())), options)
        done[name] = line
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{name:12} {'ok' if line['ok'] else 'FAILED'} in {line['seconds']:.0f} s", file=sys.stderr, flush=True)
    show(list(done.values()))
    if left:
        print(f"left: {', '.join(left)}; run the same command again")
    if options.rehearse and not all(line["ok"] for line in done.values()):
        sys.exit(1)


def run_part(name: str, limit: float, options: argparse.Namespace) -> Result:
    """A process of its own, with all that it starts."""
    command = [sys.executable, str(Path(__file__).resolve()), "--part", name]
    command += ["--rehearse"] if options.rehearse else []
    command += ["--torch-python", options.torch_python] if options.torch_python else []
    one_cpu = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    environment = os.environ | one_cpu if options.rehearse else {"CUDA_VISIBLE_DEVICES": "0"} | os.environ
    started = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        err += f"\nkilled after {limit:.0f} s"
    ok = process.returncode == 0
    line = {"part": name, "ok": ok, "date": time.strftime("%Y-%m-%d %H:%M"), "seconds": time.monotonic() - started}
    return line | (json.loads(out.splitlines()[-1]) if ok else {"error": err[-3000:]})


def default_output(rehearse: bool) -> Path:
    if rehearse:
        return Path(tempfile.mkdtemp(prefix="jaxmnt-rehearsal-")) / "results.jsonl"
    device = re.sub(r"\W+", "-", query_gpus("name")[0].lower()).strip("-")
    return HERE / "results" / f"{time.strftime('%Y-%m-%d')}-{device}.jsonl"


def read(path: Path) -> list[Result]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def show(found: Sequence[Result]) -> None:
    """A table: each number of each part."""
    for line in found:
        for name, value in flat(line):
            if name == "error" or not (isinstance(value, str) or name == "part"):
                told = f"{value:.4g}" if isinstance(value, float) else str(value).strip().splitlines()[-1]
                print(f"{line['part']:12} {name:44} {told}")


def flat(tree: Result, before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        found += flat(value, f"{before}{name}.") if isinstance(value, dict) else [(before + name, value)]
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="every part on the CPU, tiny")
    parser.add_argument("--torch-python", metavar="PATH", help="a Python that has torch")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=570.0, help="begin no part that could end later (570)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON lines, to which results are added")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
