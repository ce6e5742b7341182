"""Composes the time of a start from terms that grow with the run, each with its source."""

import math
from typing import NamedTuple


class Term(NamedTuple):
    """A part of a start."""

    name: str
    seconds: float
    source: str


def start_terms(gpus: int, processes: int, state_bytes: float) -> list[Term]:
    """Returns the parts of a start of this many processes, whose state has `state_bytes` in all, in order.

    Coefficients are measured on one machine with a load generator where the source says so. The others are assumptions.
    """
    bytes_per_process = state_bytes / processes
    return [
        Term("tasks of the launcher", 15.0, "assumed: srun or pods, on nodes that are there"),
        Term("Python and imports", 12.0, "assumed: twice what a local disk takes, for a shared file system"),
        Term("rendezvous", 0.14e-3 * processes, "measured: 0.14 ms per process"),
        Term("facts of the hosts", 0.8e-3 * processes, "measured: 0.8 ms per process (benchmarks/control_plane.py)"),
        Term("data", 0.02 + 0.2e-3 * processes, "measured: 20 ms, whatever the size, and 0.2 ms per process to send"),
        Term("compiled program from the cache", 20.0, "assumed: a program of 100 MB, read by all"),
        Term("autotuning", 0.0, "assumed: its results are in the cache as well; 30 to 120 s at the first start"),
        Term(
            "NCCL", 5.0 + 0.9 * math.sqrt(gpus), "assumed: 5 s on few GPUs, 95 s on 10,000; issues report up to 150 s"
        ),
        Term(
            "restore", 5.0 + bytes_per_process / 2e9,
            "assumed: 2 GB/s per host, with storage that can serve all hosts",
        ),
        Term("first step", 10.0, "assumed: loading the program, and buffers"),
    ]  # fmt: skip
