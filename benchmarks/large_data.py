"""Opening data: seconds, memory and file operations at the start of a process, by numbers of documents and shards.

    python benchmarks/large_data.py [--documents N …] [--shards N …] [--folder DIR]

For each size it makes prepared data in which documents start where they would in real text. Tokens and origins are
files without contents, which take no space. Then it writes the index with all cores, punches holes into what is not
read any more, and starts two processes that open the data for packed rows and read a batch: process 0, which checks the
files, and another, which does not. Seconds are those of the whole data phase, without imports, and memory is that at
its end; mapped files take none of their own. With strace, file operations on the data are counted until the first row
is read, and per shard after that. Prints a JSON line for each size. 1e8 documents take up to 3 GB and 90 seconds.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from jaxmnt.data.index import IndexKey
from jaxmnt.data.index_files import write_indices
from jaxmnt.data.manifest import FORMAT, VERSION, sealed_text
from jaxmnt.data.preparation.run import run_windows
from jaxmnt.data.store import open_prepared
from jaxmnt.distributed.container import cores

VOCABULARY = 50_304
LENGTH = 4096
BATCH_ROWS = 32

OPEN = """
import json, resource, sys, time
from pathlib import Path
import numpy as np
from jaxmnt.config.load import parse_config
from jaxmnt.data.batches import TrainingData
from jaxmnt.data.sources import open_sources
def kib(name):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":")]
    return int(line.split()[1])
config = parse_config({"data": {"path": sys.argv[1], "rows": "packed", "sequence_length": int(sys.argv[2]),
                                "global_batch_size": int(sys.argv[3])}})
TrainingData(parse_config({"data": {"synthetic": 300}}), open_sources(parse_config({"data": {"synthetic": 300}}).data))
before, cpu, started = kib("RssAnon"), time.process_time(), time.perf_counter()
training = TrainingData(config, open_sources(config.data, check_files=sys.argv[4] == "0"))
opened, private, resident = time.perf_counter() - started, kib("RssAnon"), kib("VmRSS")
Path("/tmp/benchmark-marks-opened").exists()
training.batch(0, range(int(sys.argv[3])))
print(json.dumps({
    "open_seconds": opened, "seconds_with_a_batch": time.perf_counter() - started,
    "cpu_seconds": time.process_time() - cpu, "private_mib": (private - before) / 1024, "resident_mib": resident / 1024,
    "private_mib_with_a_batch": (kib("RssAnon") - before) / 1024,
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=float, nargs="+", default=[1e6, 1e8])
    parser.add_argument("--shards", type=int, nargs="+", default=[100], help="shards of the data, for each size")
    parser.add_argument("--folder", type=Path, help="where to make the data (default: a temporary folder)")
    options = parser.parse_args()
    for documents in map(int, options.documents):
        for shards in options.shards:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                print(json.dumps(measure(Path(folder) / "data", documents, shards)), flush=True)


def measure(folder: Path, documents: int, shards: int) -> dict:
    started = time.perf_counter()
    make(folder, documents, shards)
    made = time.perf_counter()
    indexed = write_index(folder)
    result = {"documents": documents, "shards": shards, "index_seconds": time.perf_counter() - made}
    result |= {"index_bytes_a_document": sum(path.stat().st_size for path in indexed) / documents}
    punch(sorted((folder / "train").glob("documents-*")))
    result["disk_bytes"] = sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))
    for process in (0, 1):
        command = [sys.executable, "-c", OPEN, str(folder), str(LENGTH), str(BATCH_ROWS), str(process)]
        lines = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(3)]
        runs = [json.loads(line) for line in lines]
        result[f"process_{process}"] = {name: sorted(run[name] for run in runs)[1] for name in runs[0]}
        if shutil.which("strace"):
            result[f"process_{process}"] |= file_operations(command, folder)
    result |= {"seconds_in_all": time.perf_counter() - started, "date": time.strftime("%Y-%m-%d")}
    return result | {"python": platform.python_version(), "numpy": np.__version__, "cores": cores()}


def make(folder: Path, documents: int, shards: int) -> None:
    """Writes prepared data whose lengths are those of web text: a median of 365 tokens, a mean of 670."""
    for split in ("train", "eval"):
        (folder / split).mkdir(parents=True)
    (folder / "sources.txt").write_text('"all"\n')
    random, entries = np.random.default_rng(0), []
    for number, count in enumerate(np.diff(np.linspace(0, documents, shards + 1).astype(int)).tolist()):
        sizes = np.maximum(2, random.lognormal(5.9, 1.1, count)).astype(np.int64)
        tokens, name = int(sizes.sum()), f"{number:05d}-00"
        np.save(folder / "train" / f"documents-{name}.npy", np.cumsum(sizes) - sizes)
        for kind, dtype, shape in (("tokens", np.uint16, (tokens,)), ("origins", np.int64, (count, 2))):
            path = folder / "train" / f"{kind}-{name}.npy"
            with path.open("wb") as file:
                header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
                file.truncate(file.tell() + int(np.prod(shape)) * np.dtype(dtype).itemsize)
        digests = {f"{kind}-{name}.npy": "0" * 64 for kind in ("tokens", "documents", "origins")}
        entries.append({"name": name, "tokens": tokens, "documents": count, "sha256": digests})
    train = {"documents": documents, "tokens": sum(entry["tokens"] for entry in entries), "shards": entries}
    manifest = {
        "format": FORMAT, "version": VERSION, "tokenizer": {"name": "none", "end_of_document": VOCABULARY - 1},
        "vocab_size": VOCABULARY, "dtype": "uint16", "learn_mask": False, "eval_fraction": 0.0,
        "unigram_nats": {"train": None, "eval": None}, "input": {"files": 1, "bytes": 0},
        "left_out": {"bad": 0, "empty": 0, "binary": 0}, "files": {"sources.txt": "0" * 64},
        "splits": {"train": train, "eval": {"documents": 0, "tokens": 0, "shards": []}},
    }  # fmt: skip
    (folder / "manifest.json").write_text(sealed_text(manifest))


def write_index(folder: Path) -> list[Path]:
    """Writes the index with all cores, as prepare does. Returns its files."""
    run_tasks = partial(run_windows, workers=cores(), progress=lambda *_: None)
    write_indices(open_prepared(folder), [IndexKey("train", LENGTH)], run_tasks=run_tasks)
    return sorted((folder / "index").glob("*.npy"))


def punch(paths: list[Path]) -> None:
    """Gives back the space of files, which keep their sizes."""
    if shutil.which("fallocate"):
        for path in paths:
            size = path.stat().st_size - 128
            subprocess.run(["fallocate", "-p", "-o", "128", "-l", str(max(1, size)), str(path)], check=True)


def file_operations(command: list[str], folder: Path) -> dict:
    """Counts the file operations on the data before the first batch, and those of the batch by shard."""
    with tempfile.NamedTemporaryFile("r") as trace:
        calls = "trace=%file,read,pread64,fstat,lseek,ioctl"
        traced = ["strace", "-f", "-y", "-e", calls, "-o", trace.name, *command]
        subprocess.run(traced, capture_output=True, check=True)
        lines = trace.read().splitlines()
    mark = next(number for number, line in enumerate(lines) if "benchmark-marks-opened" in line)
    on_data = lambda part: [line for line in part if f"{folder}{os.sep}" in line]
    touched = {name for line in on_data(lines[mark:]) for name in re.findall(r"tokens-(\d+-\d+)\.npy", line)}
    return {
        "file_operations_before_the_first_row": len(on_data(lines[:mark])),
        "file_operations_per_shard": len(on_data(lines[mark:])) / max(1, len(touched)),
        "shards_read": len(touched),
    }


if __name__ == "__main__":
    main()
