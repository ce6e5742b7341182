"""Saving and restoring a sharded state: jaxmnt beside PyTorch's distributed checkpoint, on the same bytes, in one run.

    python benchmarks/checkpoint.py --torch-python ENV/bin/python --dir /dev/shm/checkpoint

Two processes of each hold half of every array, on the CPU. In each round either makes each measurement, one directly
after the other and the first in turn, and what it wrote is deleted again:

    host_copy   a copy of this process's shards into fresh memory, the yardstick for blocking
    step        an update of the whole state in place, while nothing is being saved
    digest      jaxmnt alone: the digests of the state by themselves
    save        a whole save, until it is committed
    blocked     for how long an asynchronous save blocks; total: until it is committed
    delayed     how much longer than `step` the update takes directly afterwards; stalled: blocked and delayed
    restored    all of restoring that checkpoint into fresh memory; jaxmnt alone: read and verify, its two parts

A figure is the larger one of the two processes; _cpu is CPU time, which other work on the machine disturbs less. Torch
has one thread to compute with, as under `torchrun`, unless OMP_NUM_THREADS says otherwise. With `--reuse` glibc keeps
what is freed: on a virtual machine that gets its memory from its host at first touch, that hides all else otherwise.
`--torch-python` may be of another environment: only torch's processes need torch. Prints a table, then one JSON line.
"""

import argparse
import gc
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

Figures = dict[str, float]

PROCESSES = 2
ARRAYS = 8
SPLIT = 1
"""The dimension of each array that is cut in two."""
SIDES = ("jaxmnt", "torch")
MEASUREMENTS = {
    "host_copy": SIDES, "step": SIDES, "digest": ("jaxmnt",), "save": SIDES, "save_async": SIDES, "restore": SIDES,
}  # fmt: skip
LAST_USE = ("save", "restore")
"""After these the files are deleted; `restore` reads what `save_async` wrote."""
RATIOS = {
    "blocked_over_host_copy": (("jaxmnt", "blocked"), ("jaxmnt", "host_copy")),
    "stalled_over_host_copy": (("jaxmnt", "stalled"), ("jaxmnt", "host_copy")),
    "blocked_over_torch_blocked": (("jaxmnt", "blocked"), ("torch", "blocked")),
    "stalled_over_torch_stalled": (("jaxmnt", "stalled"), ("torch", "stalled")),
    "save_over_torch_save": (("jaxmnt", "save"), ("torch", "save")),
    "save_cpu_over_torch_save": (("jaxmnt", "save_cpu"), ("torch", "save_cpu")),
    "total_cpu_over_torch_total": (("jaxmnt", "total_cpu"), ("torch", "total_cpu")),
    "read_over_torch_load": (("jaxmnt", "read"), ("torch", "restored")),
    "restored_over_torch_load": (("jaxmnt", "restored"), ("torch", "restored")),
    "restored_cpu_over_torch_load": (("jaxmnt", "restored_cpu"), ("torch", "restored_cpu")),
}
REUSE = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_ARENA_MAX": "1"}
"""Has glibc give nothing back to the system."""
LIMIT_SECONDS = 600.0
"""For one measurement, which takes seconds: a process that answers later hangs."""


def main() -> None:
    options = parse()
    if options.worker:
        work(**json.loads(options.worker), gib=options.gib)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # not without deleting what was written
    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=options.dir) as root:
        rounds, versions = measure(options, Path(folder), Path(root))
        filesystem = subprocess.check_output(["stat", "-f", "-c", "%T", root], text=True).strip()
    seconds = {
        side: {name: spread([found[side][name] for found in rounds]) for name in rounds[0][side]} for side in SIDES
    }
    ratios = {
        name: spread([found[a][x] / found[b][y] for found in rounds]) for name, ((a, x), (b, y)) in RATIOS.items()
    }
    result = {
        "seconds": seconds, "ratios": ratios,
        "gib": options.gib, "processes": PROCESSES, "rounds": options.rounds, "reuse": options.reuse,
        "filesystem": filesystem,
        "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "cpu": platform.machine(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("jax", "orbax-checkpoint", "tensorstore")}, **versions,
    }  # fmt: skip
    print_table(seconds, ratios)
    print(json.dumps(result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where checkpoints are written")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state, both processes together")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that does not")
    parser.add_argument("--reuse", action="store_true", help="copy and read into memory that was used before")
    parser.add_argument("--torch-python", default=sys.executable, metavar="PATH", help="a Python that has torch")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def spread(values: list[float]) -> Figures:
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 4) for name, value in found.items()}


def print_table(seconds: dict[str, dict[str, Figures]], ratios: dict[str, Figures]) -> None:
    rows = {f"{side} {name}, s": found for side, figures in seconds.items() for name, found in figures.items()}
    for name, found in (rows | ratios).items():
        print(f"{name:28} {found['median']:8.3f}   {found['min']:.3f} to {found['max']:.3f}")


def measure(options: argparse.Namespace, folder: Path, root: Path) -> tuple[list[dict[str, Figures]], dict[str, str]]:
    """The figures of each side in each round, and versions of libraries that only the workers know."""
    pythons = {"jaxmnt": sys.executable, "torch": options.torch_python}
    pairs: dict[str, Pair] = {}
    try:
        for side in SIDES:
            pairs[side] = Pair(side, pythons[side], options, folder, root / side)
        versions = {name: found for pair in pairs.values() for name, found in pair.answers()[0].items()}
        rounds = [one_round(pairs, root, SIDES[:: -1 if number % 2 else 1]) for number in range(options.rounds + 1)]
        for pair in pairs.values():
            pair.leave()
    finally:
        for pair in pairs.values():
            pair.kill()
    return rounds[1:], versions


def one_round(pairs: dict[str, "Pair"], root: Path, order: tuple[str, ...]) -> dict[str, Figures]:
    found: dict[str, Figures] = {side: {} for side in SIDES}
    for name, sides in MEASUREMENTS.items():
        for side in (side for side in order if side in sides):
            os.sync()
            found[side] |= pairs[side].slowest(name)
            if name in LAST_USE:
                shutil.rmtree(root / side)
    return found


class Pair:
    """The two processes of a side. They are told what to measure next, and write what they found as lines of JSON."""

    def __init__(self, side: str, python: str, options: argparse.Namespace, folder: Path, root: Path):
        self._told = 0
        self._files = [folder / f"{side}-{process}.jsonl" for process in range(PROCESSES)]
        self._logs = [file.with_suffix(".log") for file in self._files]
        self._workers = []
        address = f"127.0.0.1:{free_port()}"
        for process, file in enumerate(self._files):
            told = {"side": side, "process": process, "address": address, "answers": str(file), "root": str(root)}
            command = [python, __file__, "--gib", str(options.gib), "--worker", json.dumps(told)]
            environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
            if options.reuse:
                environment |= {
                    "MALLOC_MMAP_MAX_": "0",
                    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
                    "MALLOC_ARENA_MAX": "1",
                }
            with self._logs[process].open("w") as log:
                self._workers.append(
                    subprocess.Popen(
                        command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, text=True
                    )
                )

    def slowest(self, measurement: str) -> Figures:
        """The figures of one measurement, each that of the slower process."""
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(measurement + "\n")
            worker.stdin.flush()
        answers = self.answers()
        return {name: max(answer[name] for answer in answers) for name in answers[0]}

    def answers(self) -> list[dict[str, Any]]:
        """The next answer of each process."""
        self._told += 1
        deadline = time.monotonic() + LIMIT_SECONDS
        while not all(file.exists() and file.read_text().count("\n") == self._told for file in self._files):
            ended = [log for worker, log in zip(self._workers, self._logs, strict=True) if worker.poll() is not None]
            if ended or time.monotonic() > deadline:
                log = (ended or self._logs)[0]
                sys.exit(f"{log.stem} {'ended' if ended else 'hangs'}; the end of what it said:\n{tail(log)}")
            time.sleep(0.02)
        return [json.loads(file.read_text().splitlines()[-1]) for file in self._files]

    def leave(self) -> None:
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in self._workers:
            worker.wait(LIMIT_SECONDS)

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def work(side: str, process: int, address: str, answers: str, root: str, gib: float) -> None:
    """A worker process: measures what it is told to on stdin, until that is closed."""
    begin = {"jaxmnt": Jaxmnt, "torch": Torch}[side]
    worker = begin(process, address, Path(root), (8, 1024, int(gib * 4096 * 8 / ARRAYS)))
    with Path(answers).open("w") as file:
        print(json.dumps(worker.versions), file=file, flush=True)
        for line in sys.stdin:
            figures = getattr(worker, line.strip())()
            gc.collect()
            print(json.dumps(figures), file=file, flush=True)


class Clock:
    """Seconds since it was made, and of them the CPU time of all threads of this process."""

    def __init__(self) -> None:
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def both(self, name: str) -> Figures:
        return {name: self.seconds(), f"{name}_cpu": time.process_time() - self._cpu_began}


class Jaxmnt:
    """A process of jaxmnt's, with one device."""

    def __init__(self, process: int, address: str, root: Path, shape: tuple[int, ...]):
        import jax
        import jax.numpy as jnp
        from jax.sharding import AxisType, NamedSharding, PartitionSpec

        from jaxmnt.checkpoint.retention import space_needed
        from jaxmnt.checkpoint.saver import Saver
        from jaxmnt.config.schema import Checkpoint
        from jaxmnt.distributed.identity import Identity

        jax.distributed.initialize(address, PROCESSES, process, cluster_detection_method="deactivate")
        mesh = jax.make_mesh((PROCESSES,), ("fsdp",), axis_types=(AxisType.Auto,))
        sharding = NamedSharding(mesh, PartitionSpec(*[None] * SPLIT, "fsdp"))
        make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.float32), out_shardings=sharding)
        self.state = {"params": {f"array{i}": make(jax.random.key(i)) for i in range(ARRAYS)}}
        self.update = jax.jit(lambda state: jax.tree.map(jnp.negative, state), donate_argnums=0)
        describe = lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        self.abstract = jax.tree.map(describe, self.state)
        self.identity = Identity(process, PROCESSES, address)
        size = sum(array.nbytes for array in jax.tree.leaves(self.state))
        self.saver = Saver(root, Checkpoint(), space_needed(size, PROCESSES), self.identity)
        self.root, self.number, self.usual = root, 0, 0.0
        self.versions: dict[str, str] = {}

    def host_copy(self) -> Figures:
        import jax
        import numpy as np

        clock = Clock()
        shards = [shard for array in jax.tree.leaves(self.state) for shard in array.addressable_shards]
        copies = [np.asarray(shard.data).copy() for shard in shards]
        found = clock.both("host_copy")
        del copies
        return found

    def step(self) -> Figures:
        self.usual = statistics.median(self._step() for _ in range(3))
        return {"step": self.usual}

    def digest(self) -> Figures:
        from jaxmnt.checkpoint.device_digest import start_digests
        from jaxmnt.checkpoint.names import arrays_by_name

        clock = Clock()
        start_digests(arrays_by_name(self.state)).wait()
        return clock.both("digest")

    def save(self) -> Figures:
        clock = Clock()
        self._begin()
        self._finish()
        return clock.both("save")

    def save_async(self) -> Figures:
        clock = Clock()
        self._begin()
        blocked = clock.seconds()
        delayed = self._step() - self.usual
        self._finish()
        return {"blocked": blocked, "delayed": delayed, "stalled": blocked + delayed} | clock.both("total")

    def restore(self) -> Figures:
        from jaxmnt.checkpoint.commit import open_checkpoint
        from jaxmnt.checkpoint.restore import restore

        clock = Clock()
        restored = restore(open_checkpoint(self.root / str(self.number)), self.abstract, self.identity)
        return clock.both("restored") | {"read": restored.read_seconds, "verify": restored.verify_seconds}

    def _step(self) -> float:
        import jax

        clock = Clock()
        self.state = self.update(self.state)
        jax.block_until_ready(self.state)
        return clock.seconds()

    def _begin(self) -> None:
        from jaxmnt.checkpoint.manifest import Manifest

        self.number += 1
        self.saver.save(
            self.number, self.state, lambda arrays: Manifest("benchmark", self.number, arrays, {}, 0, {}, None, [])
        )

    def _finish(self) -> None:
        saved = self.saver.result(wait=True)
        assert saved is not None and saved.failure is None, saved


class Torch:
    """A process of PyTorch's, with its shards as DTensors."""

    def __init__(self, process: int, address: str, root: Path, shape: tuple[int, ...]):
        import torch
        from torch.distributed import init_process_group
        from torch.distributed.device_mesh import init_device_mesh

        init_process_group("gloo", init_method=f"tcp://{address}", rank=process, world_size=PROCESSES)
        self.mesh = init_device_mesh("cpu", (PROCESSES,))
        self.shape = [extent // PROCESSES if i == SPLIT else extent for i, extent in enumerate(shape)]
        self.tensors = {f"array{i}": torch.randn(self.shape) for i in range(ARRAYS)}
        self.root, self.number, self.usual = root, 0, 0.0
        self.versions = {"torch": torch.__version__, "torch_python": platform.python_version()}

    def host_copy(self) -> Figures:
        clock = Clock()
        copies = [tensor.clone() for tensor in self.tensors.values()]
        found = clock.both("host_copy")
        del copies
        return found

    def step(self) -> Figures:
        self.usual = statistics.median(self._step() for _ in range(3))
        return {"step": self.usual}

    def save(self) -> Figures:
        from torch.distributed.checkpoint import save

        state, path = self._sharded(self.tensors), self._next()
        clock = Clock()
        save(state, checkpoint_id=path)
        return clock.both("save")

    def save_async(self) -> Figures:
        from torch.distributed.checkpoint import async_save

        state, path = self._sharded(self.tensors), self._next()
        clock = Clock()
        saving = async_save(state, checkpoint_id=path)
        blocked = clock.seconds()
        delayed = self._step() - self.usual
        saving.result()
        return {"blocked": blocked, "delayed": delayed, "stalled": blocked + delayed} | clock.both("total")

    def restore(self) -> Figures:
        import torch
        from torch.distributed.checkpoint import load

        fresh = {name: torch.empty(self.shape) for name in self.tensors}
        state = self._sharded(fresh)
        clock = Clock()
        load(state, checkpoint_id=self.root / str(self.number))
        found = clock.both("restored")
        assert all(torch.equal(fresh[name].neg_(), tensor) for name, tensor in self.tensors.items())
        return found

    def _sharded(self, tensors: dict[str, Any]) -> dict[str, Any]:
        from torch.distributed.tensor import DTensor, Shard

        return {name: DTensor.from_local(tensor, self.mesh, [Shard(SPLIT)]) for name, tensor in tensors.items()}

    def _next(self) -> Path:
        self.number += 1
        return self.root / str(self.number)

    def _step(self) -> float:
        clock = Clock()
        for tensor in self.tensors.values():
            tensor.neg_()
        return clock.seconds()


if __name__ == "__main__":
    main()
