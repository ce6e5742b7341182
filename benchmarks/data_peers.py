"""Finished training batches a core-second: jaxmnt beside other loaders, on the same tokens, in one run.

    pip install torch mosaicml-streaming
    taskset -c 0 python benchmarks/data_peers.py

Writes the same random tokens, cut into documents of log-normal length, as prepared data, as a flat uint16 file and as
MosaicML Streaming shards. Then takes shuffled batches from each in turn, a few rounds, each in a process of its own
without workers:

    windows      data.rows: windows            packed       data.rows: packed, with segments and positions
    …_unchecked  the same, ids not compared with the vocabulary
    torch        DataLoader over a memory map  torch_batch  the same with __getitems__, a batch at a time
    nanogpt      random offsets stacked into a batch, as nanoGPT's get_batch does
    streaming    StreamingDataset in a DataLoader, a row a sample

A batch of the others holds inputs and targets as int64, one of jaxmnt five fields of 32 bits. Prints one JSON line.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from jaxmnt.config.load import parse_config
from jaxmnt.data.batches import TrainingData, training_rows
from jaxmnt.data.preparation.inputs import ReadOptions, Selection, Settings
from jaxmnt.data.preparation.run import build
from jaxmnt.data.sources import open_sources

VOCAB, END = 50_000, 49_999
FLAT = "tokens.bin"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32, help="rows a batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens a row")
    parser.add_argument("--tokens", type=int, default=2**26, help="tokens in all")
    parser.add_argument("--seconds", type=float, default=1.5, help="CPU time of one loader in one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", nargs=2, metavar=("LOADER", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        print(measure(LOADERS[options.one[0]](Path(options.one[1]), options), options))
        return
    rates: dict[str, list[float]] = {name: [] for name in LOADERS}
    with tempfile.TemporaryDirectory() as folder:
        write_everything(Path(folder), options)
        for _ in range(options.rounds):
            for name in LOADERS:
                rates[name].append(in_a_process(name, folder))
    median = {name: float(np.median(found)) for name, found in rates.items()}
    fastest = max(median[name] for name in ("torch", "torch_batch", "nanogpt", "streaming"))
    result = {
        "million_tokens_per_core_second": {name: round(rate / 1e6, 1) for name, rate in median.items()},
        "rounds": {name: [round(rate / 1e6, 1) for rate in found] for name, found in rates.items()},
        "windows_over_fastest_other": round(median["windows"] / fastest, 3),
        "packed_over_streaming": round(median["packed"] / median["streaming"], 3),
        "checked_over_unchecked": {
            rows: round(median[rows] / median[f"{rows}_unchecked"], 3) for rows in ("windows", "packed")
        },
        "rows": options.rows, "length": options.length, "tokens": options.tokens,
        "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "cpu": platform.machine(),
        **{name: version(name) for name in ("grain", "torch", "mosaicml-streaming", "numpy")},
    }  # fmt: skip
    for name, rate in result["million_tokens_per_core_second"].items():
        print(f"{name:12} {rate:8.1f} M tokens a core-second")
    print(json.dumps(result))


def in_a_process(name: str, folder: str) -> float:
    """One loader by itself: the threads that some leave behind would be counted with the next."""
    command = [sys.executable, *sys.argv, "--one", name, folder]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)


def measure(batches, options: argparse.Namespace) -> float:
    """Tokens a second of CPU time of all threads, after a warm-up as long as the measurement."""
    for _ in range(2):
        started, count = time.process_time(), 0
        while time.process_time() - started < options.seconds:
            inputs, targets = next(batches)
            assert inputs.shape == targets.shape == (options.rows, options.length)
            count += 1
    return count * options.rows * options.length / (time.process_time() - started)


def write_everything(folder: Path, options: argparse.Namespace) -> None:
    """The same tokens in the three formats."""
    flat = write_flat(folder, options.tokens)
    settings = Settings(tokenizer=None, vocab_size=VOCAB, reading=ReadOptions(end_id=END), eval_fraction=0.0)
    build(Selection([flat]), folder / "prepared", settings, lambda *progress: None)
    write_mds(folder, flat, options.length)


def write_flat(folder: Path, count: int) -> Path:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, END, count, np.uint16)
    ends = np.cumsum(np.maximum(2, rng.lognormal(6.2, 1.2, count // 200)).astype(np.int64)) - 1
    tokens[ends[ends < count]] = END
    path = folder / FLAT
    tokens.tofile(path)
    return path


def jaxmnt_batches(folder: Path, options: argparse.Namespace, rows: str, *, checked: bool = True):
    data = {
        "path": str(folder / "prepared"), "rows": rows, "global_batch_size": options.rows,
        "sequence_length": options.length,
    }  # fmt: skip
    config = parse_config({"data": data})
    training = TrainingData(config, open_sources(config.data))
    if not checked:
        training.readers["data"].stream.are_valid_ids = lambda tokens: True
    for batch in training_rows(training, range(options.rows), 0, prefetch=2, threads=0):
        yield batch["tokens"], batch["targets"]


class Flat(torch.utils.data.Dataset):
    """Windows of a memory-mapped file of tokens."""

    def __init__(self, path: Path, length: int):
        self.tokens, self.length = np.memmap(path, np.uint16, "r"), length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int):
        window = self.tokens[index * self.length : (index + 1) * self.length + 1].astype(np.int64)
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])


class FlatAtOnce(Flat):
    def __getitems__(self, indices: list[int]):
        windows = np.stack([self.tokens[i * self.length : (i + 1) * self.length + 1] for i in indices])
        whole = torch.from_numpy(windows.astype(np.int64))
        return whole[:, :-1], whole[:, 1:]


def torch_batches(folder: Path, options: argparse.Namespace, *, at_once: bool):
    dataset = (FlatAtOnce if at_once else Flat)(folder / FLAT, options.length)
    collate = (lambda batch: batch) if at_once else None
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=options.rows, shuffle=True, drop_last=True, num_workers=0, collate_fn=collate
    )
    while True:
        yield from loader


def nanogpt_batches(folder: Path, options: argparse.Namespace):
    while True:
        tokens = np.memmap(folder / FLAT, np.uint16, "r")
        starts = torch.randint(len(tokens) - options.length, (options.rows,)).tolist()
        pairs = [(tokens[i : i + options.length], tokens[i + 1 : i + 1 + options.length]) for i in starts]
        yield tuple(torch.stack([torch.from_numpy(p[side].astype(np.int64)) for p in pairs]) for side in (0, 1))


def write_mds(folder: Path, flat: Path, length: int) -> None:
    from streaming import MDSWriter

    tokens = np.memmap(flat, np.uint16, "r")
    with MDSWriter(out=str(folder / "mds"), columns={"tokens": f"ndarray:uint16:{length + 1}"}) as writer:
        for start in range(0, len(tokens) - length - 1, length):
            writer.write({"tokens": tokens[start : start + length + 1]})


def streaming_batches(folder: Path, options: argparse.Namespace):
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=options.rows)

    def collate(samples):
        whole = torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))
        return whole[:, :-1], whole[:, 1:]

    loader = torch.utils.data.DataLoader(
        dataset, batch_size=options.rows, num_workers=0, drop_last=True, collate_fn=collate
    )
    while True:
        yield from loader


LOADERS = {
    "windows": partial(jaxmnt_batches, rows="windows"),
    "packed": partial(jaxmnt_batches, rows="packed"),
    "windows_unchecked": partial(jaxmnt_batches, rows="windows", checked=False),
    "packed_unchecked": partial(jaxmnt_batches, rows="packed", checked=False),
    "torch": partial(torch_batches, at_once=False),
    "torch_batch": partial(torch_batches, at_once=True),
    "nanogpt": nanogpt_batches,
    "streaming": streaming_batches,
}

if __name__ == "__main__":
    main()
