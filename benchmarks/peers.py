"""Training a tiny Llama on CPU cores, side by side with PyTorch: eager, and DistributedDataParallel for two processes.

    python benchmarks/peers.py --torch-python ENV/bin/python

The model is that of `tiny.yaml` (3.2M parameters, 4,096 tokens a step, float32, AdamW, gradients clipped), the tokens
are random. jaxmnt is measured as its users start it, `python -m jaxmnt.train`. A process of a side alone is bound to
one core; two processes share two cores, with one thread of torch each. Sides take turns, in each of the rounds:

- CPU milliseconds and tokens of a step, from when the third step is reported to when the last is;
- seconds from the start of the process until the first step is reported, and the peak of its resident memory. jaxmnt
  has nothing compiled before the first of the rounds (cold), and then has (warm).

`--revision FOLDER` names another checkout of jaxmnt, which takes its turns as well.

Prints a table of medians, then one JSON line. Linux only. `--torch-python` may be of another environment: jaxmnt does
not need torch.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
ROWS, LENGTH, VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, MLP = 16, 256, 512, 256, 4, 4, 2, 688
SIDES = {  # processes, environment
    "torch": (1, {}),
    "torch, huge pages": (1, HUGE_PAGES),
    "jaxmnt": (1, {}),
    "jaxmnt, huge pages": (1, HUGE_PAGES),
    "torch, 2 processes": (2, {}),
    "jaxmnt, 2 processes": (2, HUGE_PAGES),
}
REVISION = {"revision": (1, {}), "revision, 2 processes": (2, {})}
RATIOS = {
    "cpu_with_huge_pages_over_torch": ("cpu_ms", "jaxmnt, huge pages", "torch"),
    "cpu_with_huge_pages_over_torch_with": ("cpu_ms", "jaxmnt, huge pages", "torch, huge pages"),
    "cpu_without_over_torch": ("cpu_ms", "jaxmnt", "torch"),
    "torch_two_over_one": ("tokens_per_second", "torch, 2 processes", "torch"),
    "jaxmnt_two_over_one": ("tokens_per_second", "jaxmnt, 2 processes", "jaxmnt, huge pages"),
    "cpu_with_huge_pages_over_revision": ("cpu_ms", "jaxmnt, huge pages", "revision"),
    "revision_over_torch": ("cpu_ms", "revision", "torch"),
    "two_over_revisions_two": ("tokens_per_second", "jaxmnt, 2 processes", "revision, 2 processes"),
}


def main() -> None:
    options = parse()
    if options.torch_worker:
        torch_worker(options.steps)
        return
    sides = SIDES | (REVISION if options.revision else {})
    rounds: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds + 1):  # the first is cold
            for side, (processes, environment) in sides.items():
                found = measure(side, processes, environment, options, Path(folder), number)
                rounds[side].append(found)
                print(f"round {number} {side:20}", found, file=sys.stderr, flush=True)
    warm = {
        side: {name: statistics.median(one[name] for one in of[1:]) for name in of[0]} for side, of in rounds.items()
    }
    print(f"{'medians':20} {'CPU ms':>8} {'tokens/s':>9} {'first step s':>13} {'cold s':>7} {'peak MiB':>9}")
    for side, of in warm.items():
        print(
            f"{side:20} {of['cpu_ms']:8.0f} {of['tokens_per_second']:9.0f} {of['first_step_s']:13.2f} "
            f"{rounds[side][0]['first_step_s']:7.2f} {max(one['peak_mib'] for one in rounds[side]):9.0f}"
        )
    # Of each round, because a shared machine drifts.
    ratios = {
        name: [round(one[figure] / other[figure], 3) for one, other in zip(rounds[a][1:], rounds[b][1:], strict=True)]
        for name, (figure, a, b) in RATIOS.items()
        if {a, b} <= rounds.keys()
    }
    for name, values in ratios.items():
        print(f"{name:36} {statistics.median(values):.3f}  of {values}")
    torch = subprocess.run(
        [options.torch_python, "-c", "import torch; print(torch.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    print(json.dumps({
        "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "steps": options.steps, "rounds": rounds,
        "ratios": ratios, "jax": version("jax"), "torch": torch,
    }))  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", default=sys.executable, metavar="PATH", help="a Python that has torch")
    parser.add_argument("--revision", metavar="FOLDER", help="another checkout of jaxmnt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15, help="steps a round")
    parser.add_argument("--torch-worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(
    side: str, processes: int, more: dict[str, str], options: argparse.Namespace, folder: Path, number: int
) -> dict[str, float]:
    """One run of a side, watched from outside."""
    run_dir = folder / f"{side}-{number}"
    run_dir.mkdir()
    lines = run_dir / "metrics.jsonl"
    environment = {name: value for name, value in os.environ.items() if name not in ("GLIBC_TUNABLES", "XLA_FLAGS")}
    environment |= {"XDG_CACHE_HOME": str(folder / f"cache of {side}"), "JAX_PLATFORMS": "cpu", **more}
    if side.startswith("torch"):
        command = [
            str(Path(options.torch_python).absolute()),
            str(Path(__file__).resolve()),
            "--torch-worker",
            "--steps",
            str(options.steps),
        ]
        environment |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(processes), "METRICS": str(lines)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + number)}
        commands = [(command, {"RANK": str(rank)}) for rank in range(processes)]
    else:
        settings = ["data.path=null", f"data.synthetic={VOCAB}", f"run.dir={run_dir}", f"train.steps={options.steps}"]
        train = ["--config", str(HERE / "tiny.yaml"), *settings]
        local = ["jaxmnt.launch", "local", "--processes", str(processes), "--devices-per-process", "1", "--"]
        module = ["jaxmnt.train"] if processes == 1 else local
        commands = [([sys.executable, "-m", *module, *train], {})]
    if side.startswith("revision"):
        environment["PYTHONPATH"] = str(Path(options.revision).absolute())
    bound = ["taskset", "-c", "0"] if processes == 1 else ["taskset", "-c", "0,1"]
    started = time.time()
    running = [
        subprocess.Popen(
            [*bound, *command],
            env=environment | own,
            cwd=folder,  # where no other jaxmnt lies
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for command, own in commands
    ]
    begin, peak = None, 0.0
    while True:
        found = written(lines)
        pids = [pid for process in running for pid in descendants(process.pid)]
        peak = max([peak, *map(peak_mib, pids)])
        if begin is None and len(found) >= 3:
            begin = (len(found), found[-1]["time"], cpu_seconds(pids))
        if len(found) >= options.steps:
            end = (len(found), found[-1]["time"], cpu_seconds(pids))
            break
        if any(process.poll() not in (None, 0) for process in running):
            raise SystemExit(f"{side}: a process failed: {commands}")
        time.sleep(0.01)
    for process in running:
        assert process.wait() == 0
    assert begin is not None
    steps = end[0] - begin[0]
    return {
        "cpu_ms": round(1e3 * (end[2] - begin[2]) / steps, 1),
        "tokens_per_second": round(steps * ROWS * LENGTH / (end[1] - begin[1]), 1),
        "first_step_s": round(found[0]["time"] - started, 2),
        "peak_mib": round(peak, 1),
    }


def written(path: Path) -> list[dict[str, float]]:
    """The lines of the steps so far."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [line for line in map(json.loads, lines) if line.get("kind", "train") == "train"]


def descendants(pid: int) -> list[int]:
    """The process, and those that it started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except FileNotFoundError:
        return []
    return [pid, *(found for child in children for found in descendants(int(child)))]


def cpu_seconds(pids: list[int]) -> float:
    fields = [Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split() for pid in pids]
    return sum(int(of[11]) + int(of[12]) for of in fields) / os.sysconf("SC_CLK_TCK")


def peak_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)


def torch_worker(steps: int) -> None:
    """The same model and update in plain eager PyTorch, of ROWS rows a step; a line a step into the file METRICS."""
    import torch
    from torch import nn
    from torch.nn import functional

    torch.manual_seed(0)
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    head = WIDTH // HEADS
    frequencies = 10000.0 ** (-torch.arange(0, head, 2) / head)
    angles = torch.arange(LENGTH)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()

    def rotated(x):  # [B, H, L, K]
        one, two = x.chunk(2, dim=-1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            linear = lambda a, b: nn.Linear(a, b, bias=False)
            self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=1e-5) for _ in range(2))
            self.q, self.out = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
            self.k, self.v = linear(WIDTH, KV_HEADS * head), linear(WIDTH, KV_HEADS * head)
            self.gate, self.up, self.down = linear(WIDTH, MLP), linear(WIDTH, MLP), linear(MLP, WIDTH)

        def forward(self, x):
            h = self.norms[0](x)
            by_head = lambda y, heads: y.view(*y.shape[:2], heads, head).transpose(1, 2)
            q, k, v = by_head(self.q(h), HEADS), by_head(self.k(h), KV_HEADS), by_head(self.v(h), KV_HEADS)
            a = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
            x = x + self.out(a.transpose(1, 2).reshape(x.shape))
            h = self.norms[1](x)
            return x + self.down(functional.silu(self.gate(h)) * self.up(h))

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
            self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.RMSNorm(WIDTH, eps=1e-5)

        def forward(self, tokens):
            return self.head(self.norm(self.blocks(self.embedding(tokens))))

    decoder: nn.Module = Decoder()
    if world > 1:
        torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
        decoder = nn.parallel.DistributedDataParallel(decoder)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95))
    with Path(os.environ["METRICS"] if rank == 0 else os.devnull).open("a", encoding="ascii") as file:
        for step in range(steps):
            tokens = torch.randint(0, VOCAB, (int(os.environ.get("ROWS", ROWS)) // world, LENGTH + 1))
            logits = decoder(tokens[:, :-1])
            loss = functional.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
            optimizer.step()
            print(json.dumps({"time": time.time(), "step": step, "loss": loss.item()}), file=file, flush=True)
    if world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
