"""Commits prepared data when all parts are done: publishes origins, and writes the index and the manifest."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxmnt.data.attempts import Attempt
from jaxmnt.data.chat.template import ChatFormat
from jaxmnt.data.index import FOLDER as INDEX_FOLDER
from jaxmnt.data.index import IndexKey
from jaxmnt.data.index_files import RunTasks, write_indices
from jaxmnt.data.manifest import (
    CHAT_TEMPLATE_FILE,
    FORMAT,
    MANIFEST,
    NAMELESS,
    SOURCES,
    SPLITS,
    TOKENIZER_FILE,
    VERSION,
    file_digest,
    sealed_text,
)
from jaxmnt.data.preparation.documents import Counts
from jaxmnt.data.preparation.inputs import LeftOut
from jaxmnt.data.preparation.markup import chat_format_of
from jaxmnt.data.preparation.part import (
    COUNTED,
    Job,
    read_array,
    read_record,
    save_array,
)
from jaxmnt.data.preparation.plan import discard
from jaxmnt.data.store import PreparedData
from jaxmnt.data.tokenizer import Tokenizer
from jaxmnt.errors import ConfigError, counted, printable
from jaxmnt.strict_json import json_text

_NOT_READ_NOUNS = {
    "hidden": ("hidden file or folder", "hidden files and folders"),
    "companions": ("file about a dataset", "files about a dataset"),
    "special": ("special file or broken link", "special files and broken links"),
}
"""Singular and plural nouns for what was not read, by the reasons of `LeftOut`."""


@dataclass(kw_only=True)
class Summary(Counts):
    """The results of a preparation that are reported to the user."""

    documents: dict[str, int]
    """Number of documents by split."""
    tokens: dict[str, int]
    """Number of tokens by split."""
    end_id: int | None = None
    """The id that separates documents in token arrays."""
    array_documents: int = 0
    """Number of documents that `end_id` separates in token arrays."""
    array_median: int = 0
    """Median number of tokens of the documents in token arrays."""
    whole_arrays: int = 0
    """Number of token arrays that are one document each."""
    chat: ChatFormat | None = None
    """The format in which conversations were rendered; None if there were none."""
    eval_fraction: float = 0.0
    """Share of documents that was to be held out."""
    held_out_by_name: list[str] = field(default_factory=list)
    """Files held out because of their names."""
    empty_files: list[str]
    """Names of empty files, each of which counts as an empty document."""
    not_read: LeftOut
    """Names of the files and folders in input folders that were not read."""

    def left_out(self) -> list[str]:
        """Returns a description of what was left out for each reason, with the names of some of the files."""
        counts_by_reason = (
            (self.skipped, "record that cannot be used", "records that cannot be used", []),
            (self.long, "document that is too long", "documents that are too long", []),
            (self.empty, "empty document", "empty documents", self.empty_files),
            (self.without_targets, "conversation without a target", "conversations without a target", []),
            (self.binary, "binary file", "binary files", self.binary_names),
            *((len(names), *_NOT_READ_NOUNS[reason], names) for reason, names in self.not_read.items()),
        )
        return [
            counted(number, singular, plural) + (f" ({_some_of(names, number)})" if names else "")
            for number, singular, plural, names in counts_by_reason
            if number
        ]

    def explain_no_training_data(self) -> str:
        """Returns the reasons why the input has nothing to train on."""
        without_binary = replace(self, binary=0)  # because binary files are described separately
        reasons = [f"left out {description}" for description in without_binary.left_out()]
        if self.binary:
            reasons.append(f"{_some_of(self.binary_names, self.binary)} {'is' if self.binary == 1 else 'are'} binary")
        if self.documents["eval"]:
            reasons.append(f"{counted(self.documents['eval'], 'document is', 'documents are')} held out")
        first_remark = f" ({self.remarks[0]})" if self.remarks else ""
        return ("; ".join(reasons) or "it holds no documents") + first_remark


def _some_of(names: list[str], number: int) -> str:
    """Returns the first three names of files, and an ellipsis if there are more than three files."""
    return f"{', '.join(map(printable, names[:3]))}{', …' if number > 3 else ''}"


def commit(job: Job, tokenizer: Tokenizer | None, not_read: LeftOut, run_tasks: RunTasks) -> Summary:
    """Combines the records of all parts, and writes the index and the manifest. `run_tasks` plans packed rows.

    Raises `ConfigError` if there is nothing to train on.
    """
    records = [read_record(job.record_path(part.number)) for part in job.parts]
    attempt = Attempt(job.work)
    splits = _splits_of(job, records, attempt)
    summary = Summary(
        documents={split: entry["documents"] for split, entry in splits.items()},
        tokens={split: entry["tokens"] for split, entry in splits.items()},
        empty_files=[file.name for file in job.inputs if not file.size],
        not_read=not_read,
    )
    for record in records:
        for name in record.keys() & COUNTED:  # earlier versions stored fewer counts
            setattr(summary, name, getattr(summary, name) + record[name])
    summary.chat = _chat_format(job, tokenizer, summary)
    summary.eval_fraction = job.settings.eval_fraction or 0.0
    if not splits["train"]["tokens"]:
        advice = "more text, or a lower --eval-fraction" if summary.documents["eval"] else "more text"
        raise ConfigError(
            f"--input: nothing was found for training: {summary.explain_no_training_data()}; "
            f"{'' if discard(job.output) else 'remove the output, then '}give {advice}"
        )
    if any(file.split == "eval" for file in job.inputs) and not splits["eval"]["tokens"]:
        removal = "" if discard(job.output) else "remove the output, then "
        raise ConfigError(
            f"--eval-input: nothing was found in it; {removal}give files that hold text, or leave --eval-input out"
        )
    _note_arrays(summary, job, records)
    if summary.chat is not None:
        with attempt.writing(job.output / CHAT_TEMPLATE_FILE, replace=True) as stream:
            stream.write(summary.chat.template.encode())
    # The manifest comes last, because it marks the output as complete.
    with attempt.writing(job.output / SOURCES, replace=True) as stream:
        stream.writelines((json_text(file.name) + "\n").encode() for file in job.inputs)
    manifest = _manifest(job, tokenizer, summary, splits, records)
    manifest |= _write_index(PreparedData(job.output, manifest), job.settings.packed_lengths, run_tasks)
    with attempt.writing(job.output / MANIFEST) as stream:
        stream.write(sealed_text(manifest).encode())
    return summary


def _manifest(
    job: Job,
    tokenizer: Tokenizer | None,
    summary: Summary,
    splits: dict[str, Any],
    records: list[dict[str, Any]],
) -> dict[str, Any]:
    """Returns the manifest, without its seal. The other files of the output must be complete."""
    names = [name for name in (SOURCES, TOKENIZER_FILE, CHAT_TEMPLATE_FILE) if (job.output / name).exists()]
    read_options = job.settings.reading
    counts = np.zeros((len(SPLITS), read_options.vocab_size), np.int64)
    for part in job.parts:  # one after another, because each array is as large as the vocabulary
        counts += read_array(job.counts_path(part.number), *counts.shape)
    # Older versions did not write these counts, so leave them out if they are 0.
    rare_counts = {name: getattr(summary, name) for name in ("long", "without_targets") if getattr(summary, name)}
    chat = {}
    if summary.chat is not None:
        chat["chat"] = summary.chat.to_json()
    description = {"name": NAMELESS, "end_of_document": read_options.end_id}
    if tokenizer is not None:
        description = tokenizer.description
    return {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": description,
        "vocab_size": read_options.vocab_size,
        "largest_id": int(np.flatnonzero(counts.any(axis=0))[-1]),
        "dtype": str(job.dtype),
        "learn_mask": read_options.chat,
        "eval_fraction": job.settings.eval_fraction,
        "unigram_nats": {split: _unigram_nats(counts[0], counts[n]) for n, split in enumerate(SPLITS)},
        "bytes_per_target": {split: _bytes_per_target(records, split) for split in SPLITS},
        "input": {"files": len(job.inputs), "bytes": sum(file.size for file in job.inputs)},
        "left_out": {"bad": summary.skipped, "empty": summary.empty, "binary": summary.binary} | rare_counts,
        "files": {name: file_digest(job.output / name) for name in names},
        "splits": splits,
    } | chat


def _write_index(prepared: PreparedData, packed_lengths: Sequence[int], run_tasks: RunTasks) -> dict[str, Any]:
    """Writes the index of the data, and returns its entry for the manifest; empty for data with few documents."""
    keys = [IndexKey(split, length) for split in SPLITS for length in packed_lengths]
    write_indices(prepared, keys, run_tasks=run_tasks)
    names = [f"{key.name}.json" for split in SPLITS for key in (IndexKey(split), *keys) if key.split == split]
    folder = prepared.path / INDEX_FOLDER
    written = {name: file_digest(folder / name) for name in names if (folder / name).exists()}
    return {"index": written} if written else {}


def _chat_format(job: Job, tokenizer: Tokenizer | None, summary: Summary) -> ChatFormat | None:
    """Returns the format of the conversations; None if there are none."""
    if not summary.conversations:
        return None
    return chat_format_of(job.settings.reading, tokenizer, summary.end_tokens)


def _splits_of(job: Job, records: list[dict[str, Any]], attempt: Attempt) -> dict[str, Any]:
    """Publishes the origins of all documents, and returns the entry of each split for the manifest."""
    splits: dict[str, Any] = {split: {"documents": 0, "tokens": 0, "shards": []} for split in SPLITS}
    records_before: Counter[int] = Counter()  # number of records of each file in earlier parts
    for record in records:
        for split, entry in record["splits"].items():
            splits[split]["documents"] += entry["documents"]
            splits[split]["tokens"] += entry["tokens"]
            splits[split]["shards"] += [
                _publish_origins(job, split, shard, records_before, attempt) for shard in entry["shards"]
            ]
        records_before.update({int(file): number for file, number in record["records"].items()})
    return splits


def _publish_origins(
    job: Job, split: str, shard: dict[str, Any], records_before: Counter[int], attempt: Attempt
) -> dict[str, Any]:
    """Publishes the origins of a shard, and returns the entry of the shard with their digest.

    `records_before` is the number of records of each file in earlier parts. It is added to the numbers of records,
    so that they count from the start of the file.
    """
    origins = read_array(job.origins_path(split, shard["name"]), None, 2)
    for file in np.unique(origins[:, 0]).tolist():
        origins[origins[:, 0] == file, 1] += records_before[file]
    name = f"origins-{shard['name']}.npy"
    save_array(job.output / split / name, origins, attempt)
    return shard | {"sha256": shard["sha256"] | {name: file_digest(job.output / split / name)}}


def _note_arrays(summary: Summary, job: Job, records: list[dict[str, Any]]) -> None:
    """Adds to the summary how token arrays were cut into documents, so that the user can notice a wrong end id."""
    array_count = sum(file.kind == "tokens" for file in job.inputs)
    end_id = job.settings.reading.end_id
    if end_id is None:
        summary.whole_arrays = array_count
        return
    lengths: Counter[int] = Counter()
    for record in records:
        lengths.update({int(length): number for length, number in record["lengths"].items()})
    summary.end_id = end_id
    summary.array_documents = lengths.total()
    if lengths:
        sizes, counts = np.array(sorted(lengths.items())).T
        summary.array_median = int(sizes[np.searchsorted(2 * np.cumsum(counts), lengths.total())])


def _bytes_per_target(records: list[dict[str, Any]], split: str) -> float | None:
    """Returns the mean number of UTF-8 bytes per target of a split; None if the split has no targets, or has token
    arrays."""
    entries = [record["splits"][split] for record in records]
    if any(entry.get("text_bytes") is None for entry in entries):  # earlier versions did not count the bytes
        return None
    targets = sum(entry["targets"] for entry in entries)
    return sum(entry["text_bytes"] for entry in entries) / targets if targets else None


def _unigram_nats(train: np.ndarray, split: np.ndarray) -> float | None:
    """Returns the cross-entropy, in nats per token, of a split under the token frequencies of the training split.

    The arguments are counts of each token; one is added to each training count. Returns None for an empty split.
    """
    if not split.sum():
        return None
    smoothed = (train + 1) / (train + 1).sum()
    return float(-(split * np.log(smoothed)).sum() / split.sum())
