"""Putting the parts together: the manifest that commits them."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxmnt.data.manifest import FORMAT, MANIFEST, SOURCES, SPLITS, TOKENIZER_FILE, VERSION, sealed
from jaxmnt.data.preparation.inputs import Part
from jaxmnt.data.preparation.part import Job, counts_path, record_path
from jaxmnt.data.preparation.shards import origins_name, read_array, read_record, save_array, write_json
from jaxmnt.data.store import file_digest
from jaxmnt.data.tokenizer import Tokenizer
from jaxmnt.errors import ConfigError
from jaxmnt.storage import publish


@dataclass
class Summary:
    """What was prepared, for the person who asked."""

    documents: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    skipped: int = 0
    empty: int = 0
    binary: int = 0
    replaced: int = 0
    long: int = 0
    split: int = 0
    broken: int = 0
    """Of those skipped, the ones whose beginning is in the data."""
    remarks: list[str] = field(default_factory=list)
    """What was wrong with the first records that were skipped."""
    binary_names: list[str] = field(default_factory=list)
    """Some of the files that are no text."""
    end_id: int | None = None
    """The id that separates documents in token arrays."""
    array_documents: int = 0
    """Into how many documents it cut them, and how many tokens these have in the median."""
    array_median: int = 0
    whole_arrays: int = 0
    """Token arrays that are a document each."""
    named: list[str] = field(default_factory=list)
    """Files that were held out because of their names."""


def commit(job: Job, parts: list[Part], tokenizer: Tokenizer | None) -> Summary:
    """Puts the parts' records together and writes the manifest, last of all."""
    records = [read_record(record_path(job.work, part.number)) for part in parts]
    splits: dict[str, Any] = {split: {"documents": 0, "tokens": 0, "shards": []} for split in SPLITS}
    before: dict[int, int] = {}  # records of each file in earlier parts
    for record in records:
        for split, entry in record["splits"].items():
            splits[split]["documents"] += entry["documents"]
            splits[split]["tokens"] += entry["tokens"]
            splits[split]["shards"] += [_with_origins(job, split, shard, before) for shard in entry["shards"]]
        for file, number in record["records"].items():
            before[int(file)] = before.get(int(file), 0) + number
    summary = _summary(records, splits)
    if not splits["train"]["tokens"]:
        raise ConfigError(
            "--input: nothing was found for training; give more text, or remove the output and lower --eval-fraction"
        )
    if any(file.split == "eval" for file in job.inputs) and not splits["eval"]["tokens"]:
        raise ConfigError("--eval-input: nothing was found in it; give files that hold text, or leave it out")
    _note_arrays(summary, job, records)
    publish(job.output / SOURCES, "".join(json.dumps(file.name) + "\n" for file in job.inputs))
    names = [SOURCES] + ([TOKENIZER_FILE] if (job.output / TOKENIZER_FILE).exists() else [])
    counts = np.zeros((len(SPLITS), job.vocab_size), np.int64)
    for part in parts:  # one at a time: there may be many, each as large as the vocabulary
        counts += read_array(counts_path(job.work, part.number), *counts.shape)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": {"name": "none", "end_of_document": job.end_of_document}
        if tokenizer is None
        else tokenizer.description,
        "vocab_size": job.vocab_size,
        "dtype": str(job.dtype),
        "learn_mask": job.reading.chat,
        "eval_fraction": job.eval_fraction,
        "unigram_nats": {split: _unigram_nats(counts[0], counts[n]) for n, split in enumerate(SPLITS)},
        "input": {"files": len(job.inputs), "bytes": sum(file.size for file in job.inputs)},
        "left_out": {"bad": summary.skipped, "empty": summary.empty, "binary": summary.binary}
        | ({"long": summary.long} if summary.long else {}),
        "files": {name: file_digest(job.output / name) for name in names},
        "splits": splits,
    }
    write_json(job.output / MANIFEST, sealed(manifest))
    return summary


def _with_origins(job: Job, split: str, shard: dict[str, Any], before: dict[int, int]) -> dict[str, Any]:
    """The shard's entry with its file of origins, in which records now count from the start of their file."""
    origins = read_array(job.work / origins_name(split, shard["name"]), None, 2)
    for file in np.unique(origins[:, 0]).tolist():
        origins[origins[:, 0] == file, 1] += before.get(file, 0)
    name = f"origins-{shard['name']}.npy"
    save_array(job.output / split / name, origins)
    return shard | {"sha256": shard["sha256"] | {name: file_digest(job.output / split / name)}}


def _summary(records: list[dict[str, Any]], splits: dict[str, Any]) -> Summary:
    summary = Summary(
        {split: entry["documents"] for split, entry in splits.items()},
        {split: entry["tokens"] for split, entry in splits.items()},
    )
    for record in records:
        for name in ("skipped", "empty", "binary", "replaced", "long", "split", "broken"):
            setattr(summary, name, getattr(summary, name) + record.get(name, 0))
        summary.remarks += record["remarks"]
        summary.binary_names += record["binary_names"]
    return summary


def _note_arrays(summary: Summary, job: Job, records: list[dict[str, Any]]) -> None:
    """How token arrays were cut into documents, of which a wrong end would make nonsense."""
    arrays = sum(file.kind == "tokens" for file in job.inputs)
    if job.reading.end_id is None:
        summary.whole_arrays = arrays
        return
    lengths: Counter[int] = Counter()
    for record in records:
        lengths.update({int(length): number for length, number in record["lengths"].items()})
    summary.end_id, summary.array_documents = job.reading.end_id, lengths.total()
    seen = 0
    for length in sorted(lengths):
        seen += lengths[length]
        if 2 * seen >= summary.array_documents:
            summary.array_median = length
            break


def _unigram_nats(train: np.ndarray, counted: np.ndarray) -> float | None:
    """Nats a token that the training text's token frequencies (plus one each) cost on the counted text."""
    if not counted.sum():
        return None
    smoothed = (train + 1) / (train + 1).sum()
    return float(-(counted * np.log(smoothed)).sum() / counted.sum())
