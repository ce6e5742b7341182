"""Preparing text: MB a core-second against the tokenizer alone, and peak memory.

    python benchmarks/prepare.py                     rate against tokenizers' own batch encoding, in turn
    python benchmarks/prepare.py --megabytes 2000 --workers 2 --memory-only
    python benchmarks/prepare.py --chat              conversations: a chat template against ChatML, in turn
    python benchmarks/prepare.py --chat --records 1000000 --memory-only

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
    parser.add_argument("--chat", action="store_true", help="conversations instead of text")
    parser.add_argument("--records", type=int, default=20_000, help="number of conversations")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.chat:
            result = chat(folder, options)
        else:
            source = write_text(folder / "text.jsonl", options.megabytes)
            result = memory(source, folder, options) if options.memory_only else rates(source, folder, options)
            result["megabytes"] = options.megabytes
    result |= {
        "workers": options.workers, "date": time.strftime("%Y-%m-%d"),
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


TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
"""Renders like the templates of Llama 3."""


def write_conversations(path: Path, records: int) -> Path:
    """Writes conversations of four messages, each of 10 to 100 words."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = np.array(["".join(rng.choice(letters[:20], size)) for size in rng.integers(1, 11, 3000)])
    texts = [" ".join(rng.choice(words, size)) for size in rng.integers(10, 100, 2000)]
    with path.open("w", encoding="utf-8") as stream:
        for numbers in rng.integers(0, len(texts), (records, 4)).tolist():
            turns = [{"role": ("user", "assistant")[turn % 2], "content": texts[n]} for turn, n in enumerate(numbers)]
            stream.write(json.dumps({"messages": turns}) + "\n")
    return path


def chat(folder: Path, options: argparse.Namespace) -> dict:
    """Measures records a CPU second of all processes, with ChatML and with a template, and peak memory."""
    source = write_conversations(folder / "chat.jsonl", options.records)
    prepare(write_text(folder / "small.jsonl", 4), folder / "bpe", 1, "--train-tokenizer", str(options.vocabulary))
    tree = json.loads((folder / "bpe" / "tokenizer.json").read_text())
    names = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    first = max(token["id"] for token in tree["added_tokens"]) + len(tree["model"]["vocab"]) + 1
    tree["added_tokens"] += [
        tree["added_tokens"][0] | {"id": first + number, "content": name} for number, name in enumerate(names)
    ]
    own = folder / "own"
    own.mkdir()
    (own / "tokenizer.json").write_text(json.dumps(tree))
    (own / "tokenizer_config.json").write_text(json.dumps({"bos_token": names[0], "eos_token": names[3]}))
    (own / "chat_template.jinja").write_text(TEMPLATE)
    arguments = ["--chat", "--tokenizer", str(own), "--eval-fraction", "0"]
    if options.memory_only:
        seconds, peak = prepare(source, folder / "out", options.workers, *arguments)
        return {"records": options.records, "peak_mib_all_processes": round(peak)}
    rates: dict[str, list[float]] = {"chatml": [], "template": []}
    for number in range(options.rounds):
        for name, more in (("chatml", ["--chat-template", "chatml"]), ("template", [])):
            output = folder / f"{name}-{number}"
            seconds, peak = prepare(source, output, options.workers, *arguments, *more)
            rates[name].append(options.records / seconds)
    ratios = np.array(rates["template"]) / np.array(rates["chatml"])
    return {
        "records": options.records,
        "chatml_records_per_cpu_second": round(float(np.median(rates["chatml"]))),
        "template_records_per_cpu_second": round(float(np.median(rates["template"]))),
        "ratio_median": round(float(np.median(ratios)), 3),
        "peak_mib_all_processes": round(peak),
    }


if __name__ == "__main__":
    main()
