"""Reading batches: tokens a core-second from flat memory-mapped arrays, and from a record format.

    python benchmarks/data.py

Writes random tokens twice to a temporary folder, as prepared data and as ArrayRecord (one row a record, group size 1,
which is its fastest setting for random access), and reads the same shuffled rows of both. Prints one JSON line.
"""

import argparse
import json
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import grain
import numpy as np
from array_record.python import array_record_module

from jaxmnt.data.batches import training_rows
from jaxmnt.data.store import FORMAT, MANIFEST, VERSION, SplitWriter, open_prepared
from jaxmnt.data.tokenizer import Bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32, help="rows a batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens a row")
    parser.add_argument("--tokens", type=int, default=2**26, help="tokens in all")
    parser.add_argument("--batches", type=int, default=200)
    options = parser.parse_args()
    tokens = np.random.default_rng(0).integers(0, 257, options.tokens, np.uint16)
    with tempfile.TemporaryDirectory() as folder:
        ours = write_prepared(tokens, Path(folder) / "prepared")
        records = write_records(tokens, Path(folder) / "records", options.length)
        result = {
            "flat_tokens_per_core_second": rate(flat_batches(ours, options), options),
            "arrayrecord_tokens_per_core_second": rate(record_batches(records, options), options),
        }
    result["ratio"] = result["flat_tokens_per_core_second"] / result["arrayrecord_tokens_per_core_second"]
    result |= {"rows": options.rows, "length": options.length, "date": time.strftime("%Y-%m-%d")}
    result |= {"python": platform.python_version(), "grain": version("grain"), "cpu": platform.machine()}
    print(json.dumps(result))


def rate(batches, options: argparse.Namespace) -> float:
    """Tokens a second of CPU time of all threads, after a warm-up."""
    for _ in range(10):
        next(batches)
    started = time.process_time()
    for _ in range(options.batches):
        assert next(batches)["tokens"].shape == (options.rows, options.length)
    return options.batches * options.rows * options.length / (time.process_time() - started)


def write_prepared(tokens: np.ndarray, folder: Path) -> Path:
    tokenizer = Bytes()
    splits = {}
    for split in ("train", "eval"):
        writer = SplitWriter(folder / split, tokenizer)
        if split == "train":
            for document in np.split(tokens, 1024):
                writer.add(document)
        splits[split] = writer.close()
    manifest = {"format": FORMAT, "version": VERSION, "vocab_size": 257, "splits": splits}
    manifest["tokenizer"] = {"name": "bytes", "end_of_document": 256}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def flat_batches(folder: Path, options: argparse.Namespace):
    return training_rows(
        open_prepared(str(folder)), seed=0, rows=range(options.rows), global_rows=options.rows, length=options.length,
        document_mask=False, start_step=0, prefetch=2,
    )  # fmt: skip


def write_records(tokens: np.ndarray, path: Path, length: int) -> Path:
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for start in range(0, len(tokens) - length, length):
        writer.write(tokens[start : start + length + 1].tobytes())
    writer.close()
    return path


def record_batches(path: Path, options: argparse.Namespace):
    """The same fields as training reads, a row a record."""
    source = grain.sources.ArrayRecordDataSource([str(path)])

    def row(record: bytes) -> dict:
        tokens = np.frombuffer(record, np.uint16).astype(np.int32)
        positions = np.arange(options.length, dtype=np.int32)
        ones = np.ones(options.length, np.int32)
        return {
            "tokens": tokens[:-1], "targets": tokens[1:], "weights": ones.astype(np.float32),
            "segments": ones, "positions": positions,
        }  # fmt: skip

    dataset = grain.MapDataset.source(source).seed(0).shuffle().repeat().map(row).batch(options.rows)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)))


if __name__ == "__main__":
    main()
