"""Reading batches: tokens a core-second from flat memory-mapped arrays, and from a record format.

    python benchmarks/data.py

Writes random tokens twice to a temporary folder, as prepared data and as ArrayRecord (one row a record, group size 1,
which is its fastest spec for random access), and reads the same shuffled rows of both. Prints one JSON line.
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

from jaxmnt.config.load import parse_config
from jaxmnt.data.batches import TrainingData, training_rows
from jaxmnt.data.preparation.inputs import ReadOptions, Selection, Settings
from jaxmnt.data.preparation.run import build
from jaxmnt.data.sources import open_sources


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32, help="rows a batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens a row")
    parser.add_argument("--tokens", type=int, default=2**26, help="tokens in all")
    parser.add_argument("--batches", type=int, default=200)
    options = parser.parse_args()
    tokens = np.random.default_rng(0).integers(0, 257, options.tokens, np.uint16)
    with tempfile.TemporaryDirectory() as folder:
        ours = write_prepared(tokens, Path(folder))
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
    np.save(folder / "tokens.npy", tokens)
    settings = Settings(tokenizer=None, vocab_size=257, reading=ReadOptions(end_id=256), eval_fraction=0.0)
    build(Selection([folder / "tokens.npy"]), folder / "prepared", settings, lambda *progress: None)
    return folder / "prepared"


def flat_batches(folder: Path, options: argparse.Namespace):
    data = {"path": str(folder), "global_batch_size": options.rows, "sequence_length": options.length}
    config = parse_config({"data": data})
    training = TrainingData(config, open_sources(config.data))
    return training_rows(training, range(options.rows), 0, prefetch=2, threads=2)


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
