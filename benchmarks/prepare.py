"""Preparing text: MB a core-second against the tokenizer alone, and peak memory.

    python benchmarks/prepare.py                     rate against tokenizers' own batch encoding, in turn
    python benchmarks/prepare.py --megabytes 2000 --workers 2 --memory-only

Generates JSON lines of English-like text, trains a BPE on some of it, then prepares all of it in a process of its own,
and encodes the same documents in batches with the tokenizers library alone on one thread. CPU time counts, of all
processes. Prints one JSON line.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-only", action="store_true", help="prepare once, with bytes for tokens")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = write_text(folder / "text.jsonl", options.megabytes)
        result = memory(source, folder, options) if options.memory_only else rates(source, folder, options)
    result |= {
        "megabytes": options.megabytes, "workers": options.workers, "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(), "cpu": platform.machine(), "tokenizers": version("tokenizers"),
    }  # fmt: skip
    print(json.dumps(result))


def write_text(path: Path, megabytes: int) -> Path:
    """Documents of words whose frequencies fall off as in real text."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = np.array(["".join(rng.choice(letters[:20], size)) for size in rng.integers(1, 11, 30_000)])
    weights = 1 / np.arange(10, 10 + len(words))
    with path.open("w", encoding="utf-8") as stream:
        while stream.tell() < megabytes * 10**6:
            chosen = words[rng.choice(len(words), 200_000, p=weights / weights.sum())]
            cuts = np.cumsum(rng.integers(20, 900, 2000))
            for document in np.split(chosen, cuts[cuts < len(chosen)]):
                stream.write(json.dumps({"text": " ".join(document)}) + "\n")
    return path


def prepare(source: Path, output: Path, workers: int, *arguments: str) -> tuple[float, float]:
    """CPU seconds of all processes, and the sum of their peak memories in MiB as sampled."""
    command = [sys.executable, "-m", "jaxmnt.prepare", "--input", source, "--output", output, "--workers", workers]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen([*map(str, command), *arguments], stdout=subprocess.DEVNULL)
    sampler = Sampler(process.pid)
    assert process.wait() == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime), sampler.peak_mib


class Sampler(threading.Thread):
    """Watches the resident memory of a process and of its children."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self._pid, self.peak_mib = pid, 0.0
        self.start()

    def run(self) -> None:
        while Path(f"/proc/{self._pid}").exists():
            total = 0
            try:
                children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
                for pid in [str(self._pid), *children]:
                    status = Path(f"/proc/{pid}/smaps_rollup").read_text()
                    total += int(status.split("Pss:")[1].split()[0])
            except (OSError, IndexError):
                continue
            self.peak_mib = max(self.peak_mib, total / 1024)
            time.sleep(0.05)


def memory(source: Path, folder: Path, options: argparse.Namespace) -> dict:
    _, peak = prepare(source, folder / "out", options.workers)
    return {"input_mib": source.stat().st_size / 2**20, "peak_mib_all_processes": round(peak)}


def rates(source: Path, folder: Path, options: argparse.Namespace) -> dict:
    import tokenizers

    small = write_text(folder / "small.jsonl", 8)
    prepare(small, folder / "bpe", 1, "--train-tokenizer", str(options.vocabulary))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "bpe" / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in source.open(encoding="utf-8")]
    size = sum(len(text.encode()) for text in texts)
    ours, alone = [], []
    for number in range(options.rounds):
        started = time.process_time()
        for first in range(0, len(texts), 256):
            tokenizer.encode_batch_fast(texts[first : first + 256], add_special_tokens=False)
        alone.append(size / 1e6 / (time.process_time() - started))
        seconds, peak = prepare(source, folder / f"out-{number}", options.workers, "--tokenizer", str(folder / "bpe"))
        ours.append(size / 1e6 / seconds)
    return {
        "prepare_mb_per_core_second": round(float(np.median(ours)), 2),
        "tokenizer_mb_per_core_second": round(float(np.median(alone)), 2),
        "ratio_median": round(float(np.median(np.array(ours) / np.array(alone))), 3),
        "ratios": [round(a / b, 3) for a, b in zip(ours, alone, strict=True)],
        "peak_mib_all_processes": round(peak),
    }


if __name__ == "__main__":
    main()
