"""The whole preparation: plan, tokenizer, parts in worker processes, and the manifest that commits it all."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxmnt.data.preparation.documents import Reading
from jaxmnt.data.preparation.inputs import Input, Part, Selection, cut_into_parts, find_inputs
from jaxmnt.data.preparation.part import Job, counts_path, do_part, held_out_documents, record_path
from jaxmnt.data.preparation.shards import SHARD_TOKENS, cannot_write, origins_name, save_array, write_json, write_text
from jaxmnt.data.preparation.workers import Work, run
from jaxmnt.data.store import FORMAT, MANIFEST, SOURCES, SPLITS, VERSION, file_digest
from jaxmnt.data.tokenizer import TOKENIZER_FILE, Tokenizer, choose_tokenizer, make_tokenizer, train_bpe
from jaxmnt.errors import ConfigError

_WORK = "work"
_TRAINING_BYTES = 2**28
"""Text that a tokenizer is trained on at most, taken evenly from all parts."""


@dataclass(frozen=True)
class Settings:
    """How to prepare. Everything but `workers` is part of what comes out."""

    tokenizer: str | None = "bytes"
    """bytes, the path of a tokenizer.json, or None for token arrays of a vocabulary of their own."""
    end_token: str | None = None
    train_tokenizer: int | None = None
    """Train a BPE of so many tokens on the input instead."""
    reading: Reading = field(default_factory=Reading)
    vocab_size: int | None = None
    """Of token arrays, where no tokenizer says it."""
    eval_fraction: float = 0.02
    skip_bad: bool = False
    workers: int = 1
    shard_tokens: int = SHARD_TOKENS
    part_bytes: int | None = None
    """Bytes of input a part; default by the size of the whole."""


@dataclass
class Summary:
    """What was prepared, for the person who asked."""

    documents: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    skipped: int = 0
    empty: int = 0
    binary: int = 0
    replaced: int = 0
    remarks: list[str] = field(default_factory=list)
    """What was wrong with the first records that were skipped."""
    binary_names: list[str] = field(default_factory=list)
    """Some of the files that are no text."""


Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done and bytes in all."""


def build(selection: Selection, output: Path, settings: Settings, progress: Progress) -> Summary:
    """Writes prepared data to `output`: anew, or going on where the same preparation was stopped.

    The same input gives the same bytes whatever the number of workers. Raises `ConfigError` for input or arguments that
    cannot work, `UserError` when the output cannot be written.
    """
    work = output / _WORK
    _check_output(output, work)
    inputs = find_inputs(selection, output)
    parts = cut_into_parts(inputs, settings.reading.token_bytes, settings.part_bytes)
    try:
        with _claimed(output, work):
            _check_plan(output, work, inputs, settings)
            tokenizer = _tokenizer(inputs, parts, output, work, settings, progress)
            job = _job(inputs, output, work, settings, tokenizer)
            _do_parts(job, parts, tokenizer, settings.workers, progress)
            _check_unchanged(work, inputs, settings)
            return _commit(job, parts, tokenizer)
    except OSError as error:
        raise cannot_write(output, error) from error
    finally:
        if (output / MANIFEST).exists():
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _claimed(output: Path, work: Path) -> Iterator[None]:
    """Inside, no other process prepares the same output, and it is not finished."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--output: another process is preparing {output}; wait for it") from None
        _check_output(output, work)  # another process may have finished just now
        yield


def _check_output(output: Path, work: Path) -> None:
    if (output / MANIFEST).exists():
        shutil.rmtree(work, ignore_errors=True)  # in case it was killed after the last step but this
        raise ConfigError(f"--output: {output} is prepared already; choose another folder, or remove it")
    if output.exists() and not work.is_dir() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output: {output} exists already and is no prepared data; choose another folder")


def _plan(inputs: list[Input], settings: Settings) -> dict[str, Any]:
    """What determines the output. Skipping bad records or not changes no part that is done."""
    given = {name: value for name, value in asdict(settings).items() if name not in ("workers", "skip_bad")}
    path = Path(settings.tokenizer or "")
    path = path / TOKENIZER_FILE if path.is_dir() else path
    plan = {
        "version": VERSION,
        "settings": given | {"tokenizer_sha256": file_digest(path) if path.is_file() else None},
        "inputs": [[file.name, str(file.path), file.size, file.path.stat().st_mtime_ns] for file in inputs],
    }
    return dict(json.loads(json.dumps(plan)))


def _check_plan(output: Path, work: Path, inputs: list[Input], settings: Settings) -> None:
    """Writes down what is prepared, or refuses to go on with something else that is half done."""
    plan, path = _plan(inputs, settings), work / "plan.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if before != plan:
        if before is not None and any(work.glob("part-*.json")):
            changed = sorted(name for name in plan if before.get(name) != plan[name])
            raise ConfigError(
                f"--output: {output} holds an unfinished preparation with other {' and '.join(changed)}; "
                "give the same command to go on with it, or remove the folder"
            )
        (output / TOKENIZER_FILE).unlink(missing_ok=True)
        write_json(path, plan)
    for split in SPLITS:
        (output / split).mkdir(exist_ok=True)


def _check_unchanged(work: Path, inputs: list[Input], settings: Settings) -> None:
    if json.loads((work / "plan.json").read_text(encoding="utf-8")) != _plan(inputs, settings):
        raise ConfigError(
            "--input: files were changed while they were being prepared; remove the output and prepare them again"
        )


def _tokenizer(
    inputs: list[Input], parts: list[Part], output: Path, work: Path, settings: Settings, progress: Progress
) -> Tokenizer | None:
    """The tokenizer, its file in the output. None for token arrays that no tokenizer goes with."""
    if settings.tokenizer is None and settings.train_tokenizer is None:
        _check_arrays(inputs, settings, None)
        return None
    target = output / TOKENIZER_FILE
    if settings.train_tokenizer is not None:
        if not target.exists():
            write_text(target, _train(inputs, parts, output, work, settings, progress))
        return choose_tokenizer(str(target), settings.end_token)
    assert settings.tokenizer is not None
    tokenizer = choose_tokenizer(settings.tokenizer, settings.end_token)
    if settings.tokenizer != "bytes" and not target.exists():
        source = Path(settings.tokenizer)
        write_text(target, (source / TOKENIZER_FILE if source.is_dir() else source).read_text(encoding="utf-8"))
    _check_arrays(inputs, settings, tokenizer)
    return tokenizer


def _check_arrays(inputs: list[Input], settings: Settings, tokenizer: Tokenizer | None) -> None:
    """Text needs a tokenizer; token arrays need to say what ends a document and how many ids there are."""
    arrays = [file for file in inputs if file.kind == "tokens"]
    texts = [file for file in inputs if file.kind != "tokens"]
    if texts and tokenizer is None:
        raise ConfigError(f"--tokenizer: {texts[0].path} is text and needs one; give it, or leave --vocab-size out")
    if arrays and tokenizer is None and None in (settings.vocab_size, settings.reading.end_id):
        raise ConfigError(
            f"--input: {arrays[0].path} is a token array; give --vocab-size and --end-id, "
            "or the --tokenizer that made it"
        )


def _train(
    inputs: list[Input], parts: list[Part], output: Path, work: Path, settings: Settings, progress: Progress
) -> str:
    """Trains a BPE on documents for training, up to the same number of characters of each part."""
    assert settings.train_tokenizer is not None
    if settings.train_tokenizer < 300:
        raise ConfigError(
            f"--train-tokenizer: {settings.train_tokenizer} leaves no room beside 256 bytes; give 300 or more"
        )
    if not any(file.size for file in inputs if file.kind != "tokens"):
        raise ConfigError("--train-tokenizer: the input has no text to train on; give some")
    if any(file.kind == "tokens" for file in inputs):
        raise ConfigError(
            "--train-tokenizer: token arrays have tokens of another tokenizer; prepare them by themselves"
        )
    job = Job(inputs, output, work, settings.reading, settings.eval_fraction, True, 0, 0)
    each = max(_TRAINING_BYTES // max(1, len(parts)), 1)
    total = min(sum(file.size for file in inputs), _TRAINING_BYTES)
    done = 0

    def texts() -> Iterator[str]:
        nonlocal done
        for part in parts:
            taken = 0
            for held_out, document in held_out_documents(job, part, lambda count: None):
                if taken >= each:
                    break
                for segment in document.segments:
                    if isinstance(segment.content, str) and not segment.markup:
                        taken += len(segment.content)
                        done += len(segment.content)
                        progress("training the tokenizer", min(done, total), total)
                        if not held_out:
                            yield segment.content
                    if taken >= each:
                        break

    return train_bpe(texts(), settings.train_tokenizer)


def _job(inputs: list[Input], output: Path, work: Path, settings: Settings, tokenizer: Tokenizer | None) -> Job:
    end = settings.reading.end_id
    if tokenizer is not None:
        if end not in (None, tokenizer.end_of_document):
            raise ConfigError(f"--end-id: the tokenizer's is {tokenizer.end_of_document}; name another by --end-token")
        end = tokenizer.end_of_document
        vocab = max(tokenizer.vocab_size, settings.vocab_size or 0)
    else:
        assert settings.vocab_size is not None
        vocab = settings.vocab_size
    assert end is not None
    if not 0 <= end < vocab:
        raise ConfigError(f"--end-id: {end} is not below the vocabulary's {vocab}")
    reading = replace(settings.reading, end_id=end, vocab_size=vocab)
    return Job(
        inputs, output, work, reading, settings.eval_fraction, settings.skip_bad, vocab, end, settings.shard_tokens
    )


def _do_parts(job: Job, parts: list[Part], tokenizer: Tokenizer | None, workers: int, progress: Progress) -> None:
    total = sum(file.size for file in job.inputs)
    left = [part for part in parts if not record_path(job.work, part.number).exists()]
    done_before = sum(_bytes(job, part) for part in parts) - sum(_bytes(job, part) for part in left)
    show = lambda done: progress("preparing", min(done_before + done, total), total)
    show(0)
    description = None if tokenizer is None else tokenizer.description
    for _ in run(left, partial(_make_work, job, description), workers, show):
        pass
    progress("preparing", total, total)


def _make_work(job: Job, description: dict[str, Any] | None) -> Work:
    """In a worker: what does one part."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    tokenizer = None if description is None else make_tokenizer(description, job.output)
    return lambda part, advance: do_part(job, part, tokenizer, advance)


def _bytes(job: Job, part: Part) -> int:
    """Bytes of input, about."""
    return sum(
        piece.stop - piece.start if job.inputs[piece.file].kind in ("text", "jsonl") else job.inputs[piece.file].size
        for piece in part.pieces
    )


def _commit(job: Job, parts: list[Part], tokenizer: Tokenizer | None) -> Summary:
    """Puts the parts' records together and writes the manifest, last of all."""
    records = [json.loads(record_path(job.work, part.number).read_text(encoding="utf-8")) for part in parts]
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
        raise ConfigError("--input: nothing was found for training; give more text or lower --eval-fraction")
    write_text(job.output / SOURCES, "".join(json.dumps(file.name) + "\n" for file in job.inputs))
    names = [SOURCES] + ([TOKENIZER_FILE] if (job.output / TOKENIZER_FILE).exists() else [])
    counts = sum(np.load(counts_path(job.work, part.number)) for part in parts)
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
        "left_out": {"bad": summary.skipped, "empty": summary.empty, "binary": summary.binary},
        "files": {name: file_digest(job.output / name) for name in names},
        "splits": splits,
    }
    write_json(job.output / MANIFEST, manifest)
    return summary


def _with_origins(job: Job, split: str, shard: dict[str, Any], before: dict[int, int]) -> dict[str, Any]:
    """The shard's entry with its file of origins, in which records now count from the start of their file."""
    origins = np.load(job.work / origins_name(split, shard["name"]))
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
        for name in ("skipped", "empty", "binary", "replaced"):
            setattr(summary, name, getattr(summary, name) + record[name])
        summary.remarks += record["remarks"]
        summary.binary_names += record["binary_names"]
    return summary


def _unigram_nats(train: np.ndarray, counted: np.ndarray) -> float | None:
    """Nats a token that the training text's token frequencies (plus one each) cost on the counted text."""
    if not counted.sum():
        return None
    smoothed = (train + 1) / (train + 1).sum()
    return float(-(counted * np.log(smoothed)).sum() / counted.sum())
