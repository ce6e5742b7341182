"""The whole preparation: plan, tokenizer, parts in worker processes, and the manifest that commits it all."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxmnt.data.manifest import LARGEST_VOCABULARY
from jaxmnt.data.preparation.commit import Summary, commit
from jaxmnt.data.preparation.held_out import decide
from jaxmnt.data.preparation.inputs import Input, Part, Selection, cut_into_parts, find_inputs
from jaxmnt.data.preparation.part import Job, do_part, record_path
from jaxmnt.data.preparation.plan import check_output, check_plan, check_unchanged, claimed, remove_work
from jaxmnt.data.preparation.settings import Settings
from jaxmnt.data.preparation.shards import cannot_write
from jaxmnt.data.preparation.tokenizing import Progress, check_kinds, prepare_tokenizer
from jaxmnt.data.preparation.workers import Work, run
from jaxmnt.data.tokenizer import Tokenizer, make_tokenizer
from jaxmnt.errors import ConfigError, printable

_WORK = "work"


def build(selection: Selection, output: Path, settings: Settings, progress: Progress) -> Summary:
    """Writes prepared data to `output`: anew, or going on where the same preparation was stopped.

    The same input gives the same bytes whatever the number of workers. Raises `ConfigError` for input or arguments that
    cannot work, `UserError` when the output cannot be written.
    """
    work = output / _WORK
    try:
        check_output(output, work)
        inputs = find_inputs(selection, output)
    except OSError as error:
        name = printable(str(error.filename))
        raise ConfigError(f"{name} cannot be read: {error.strerror}; check the path and its rights") from error
    inputs, settings = decide(inputs, settings)
    check_kinds(inputs, settings)
    parts = cut_into_parts(inputs, settings.reading.token_bytes, settings.part_bytes)
    try:
        with claimed(output, work):
            check_plan(output, work, inputs, settings)
            tokenizer = prepare_tokenizer(inputs, parts, output, work, settings, progress)
            job = _job(inputs, output, work, settings, tokenizer)
            _do_parts(job, parts, tokenizer, settings.workers, progress)
            check_unchanged(inputs)
            summary = commit(job, parts, tokenizer)
            summary.named = [file.shown for file in inputs if file.split == "eval" and not selection.eval_inputs]
            return summary
    except OSError as error:
        raise cannot_write(output, error) from error
    finally:
        remove_work(output, work)


def _job(inputs: list[Input], output: Path, work: Path, settings: Settings, tokenizer: Tokenizer | None) -> Job:
    end = settings.reading.end_id
    if tokenizer is not None:
        if end not in (None, tokenizer.end_of_document):
            known = "is not named" if tokenizer.end_of_document is None else f"is {tokenizer.end_of_document}"
            raise ConfigError(f"--end-id: the tokenizer's own {known}; name another by --end-token")
        end = tokenizer.end_of_document
        vocab = max(tokenizer.vocab_size, settings.vocab_size or 0)
    else:
        assert settings.vocab_size is not None
        vocab = settings.vocab_size
    if not 2 <= vocab <= LARGEST_VOCABULARY:
        raise ConfigError(f"--vocab-size: {vocab} is no size of a vocabulary; give one from 2 to {LARGEST_VOCABULARY}")
    if end is not None and not 0 <= end < vocab:
        raise ConfigError(f"--end-id: {end} is not one of the vocabulary's ids, which are 0 to {vocab - 1}")
    assert settings.eval_fraction is not None
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
