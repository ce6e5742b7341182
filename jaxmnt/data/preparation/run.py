"""Prepares data: first the tokenizer, then the parts in worker processes, then the commit."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing import connection
from pathlib import Path
from typing import Any

from jaxmnt import storage
from jaxmnt.data.manifest import MAX_VOCABULARY, TOKENIZER_FILE
from jaxmnt.data.preparation.attempts import remove_leftovers
from jaxmnt.data.preparation.inputs import (
    Input,
    Part,
    Selection,
    Settings,
    check_unchanged,
    cut_into_parts,
    decide_held_out,
    find_inputs,
)
from jaxmnt.data.preparation.part import Job, held_out_documents, prepare_part
from jaxmnt.data.preparation.plan import Summary, check_output, check_plan, commit, locked_output, remove_work
from jaxmnt.data.tokenizer import Tokenizer, choose_tokenizer, file_of_tokenizer, make_tokenizer, train_bpe
from jaxmnt.errors import ConfigError, UserError, printable
from jaxmnt.storage import publish

_TRAINING_BYTES = 2**28
"""Most characters that a tokenizer is trained on, taken evenly from all parts."""

Progress = Callable[[str, int, int], None]
"""Called with the current activity, bytes done and total bytes."""


def prepare_tokenizer(job: Job, progress: Progress) -> Tokenizer | None:
    """Returns the tokenizer, and puts its file into the output. None for token arrays without a tokenizer."""
    settings = job.settings
    target = job.output / TOKENIZER_FILE
    if settings.train_tokenizer is not None:
        if not target.exists():
            publish(target, _train(job, settings.train_tokenizer, progress))
        return choose_tokenizer(str(target), settings.end_token, for_text=True)
    if settings.tokenizer is None:
        return None
    has_text = any(file.kind != "tokens" for file in job.inputs)
    tokenizer = choose_tokenizer(settings.tokenizer, settings.end_token, for_text=has_text)
    if settings.tokenizer != "bytes" and not target.exists():
        # Copied as bytes, because reading as text could change line ends.
        publish(target, storage.read(file_of_tokenizer(settings.tokenizer)).decode())
    return tokenizer


def check_kinds(inputs: list[Input], settings: Settings) -> None:
    """Checks that the inputs fit the settings. Raises `ConfigError`.

    Text needs a tokenizer, token arrays need a tokenizer or a vocabulary size, and conversations need records.
    """
    arrays = [file for file in inputs if file.kind == "tokens"]
    texts = [file for file in inputs if file.kind != "tokens"]
    if texts and settings.tokenizer is None and settings.train_tokenizer is None:
        raise ConfigError(f"--tokenizer: {texts[0].shown} is text and needs one; give it, or leave --vocab-size out")
    has_tokenizer = settings.tokenizer not in (None, "bytes") or settings.train_tokenizer is not None
    if arrays and not has_tokenizer and not settings.vocab_size:
        raise ConfigError(
            f"--input: {arrays[0].shown} is a token array; give --vocab-size (and --end-id, if an id separates "
            "documents), or the --tokenizer that made it"
        )
    without_records = [file for file in inputs if file.kind in ("text", "tokens")]
    if settings.reading.chat and without_records:
        raise ConfigError(
            f"--chat: {without_records[0].shown} holds no records; give JSON lines or Parquet, or leave others out by "
            "--suffix"
        )


def _train(job: Job, vocab_size: int, progress: Progress) -> str:
    """Trains a BPE on the training documents, with at most the same number of characters from each part."""
    if vocab_size < 300:
        raise ConfigError(f"--train-tokenizer: {vocab_size} leaves no room beside 256 bytes; give 300 or more")
    if not any(file.size for file in job.inputs if file.kind != "tokens"):
        raise ConfigError("--train-tokenizer: the input has no text to train on; give some")
    if any(file.kind == "tokens" for file in job.inputs):
        raise ConfigError("--train-tokenizer: token arrays have tokens of another tokenizer; prepare them separately")
    characters_per_part = max(_TRAINING_BYTES // max(1, len(job.parts)), 1)
    total = min(sum(file.size for file in job.inputs), _TRAINING_BYTES)
    done = 0

    def texts(part: Part) -> Iterator[str]:
        nonlocal done
        characters = 0
        for held_out, document in held_out_documents(job, part):
            for segment in document.segments:
                if isinstance(segment.content, str) and not segment.markup:
                    characters += len(segment.content)
                    done += len(segment.content)
                    progress("training the tokenizer", min(done, total), total)
                    if not held_out:
                        yield segment.content
                    if characters >= characters_per_part:
                        return

    return train_bpe(chain.from_iterable(map(texts, job.parts)), vocab_size)


_POLL_SECONDS = 0.2

Work = Callable[[Any, Callable[[int], None]], object]
"""Function that processes one item and calls its second argument with the bytes it has read."""


class StoppedError(Exception):
    """Raised in a worker whose result is no longer needed."""


_shared: tuple[Any, Any, Any, Work] | None = None
"""State of a worker process: bytes done, stop flag, busy flag of each item, and the work."""


def run(
    items: Sequence[Any],
    make_work: Callable[[], Work],
    workers: int,
    progress: Callable[[int], None],
) -> None:
    """Processes all items; `progress` is called with the bytes done so far.

    `make_work` is called once in every worker and must be picklable, like the items. With one worker all work happens
    in this process. The first error stops all workers. If a worker dies, the `UserError` names the items in progress.
    """
    if workers == 1 or len(items) < 2:
        _run_here(items, make_work(), progress)
        return
    context = multiprocessing.get_context("spawn")
    done, stop, busy = context.Value("q", 0), context.Value("b", 0), context.Array("b", len(items))
    pool = ProcessPoolExecutor(min(workers, len(items)), context, _start_worker, (done, stop, busy, make_work))
    try:
        pending = {pool.submit(_process, item, number) for number, item in enumerate(items)}
        while pending:
            finished, pending = wait(pending, _POLL_SECONDS, FIRST_COMPLETED)
            progress(done.value)
            for future in finished:
                future.result()
    except BrokenProcessPool as error:
        names = ", ".join(str(item) for item, is_begun in zip(items, busy[:], strict=True) if is_begun)
        raise UserError(
            f"a worker was killed; inputs being read: {names or 'none yet'}; perhaps memory ran out, or a file is "
            "damaged; run the same command again with fewer --workers, or leave the file out with --exclude: it "
            "continues with the parts that are not done"
        ) from error
    finally:
        stop.value = 1
        pool.shutdown(cancel_futures=True)


def _run_here(items: Sequence[Any], work: Work, progress: Callable[[int], None]) -> None:
    total = 0

    def advance(count: int) -> None:
        nonlocal total
        total += count
        progress(total)

    for item in items:
        work(item, advance)


def _start_worker(done: Any, stop: Any, busy: Any, make_work: Callable[[], Work]) -> None:
    global _shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it too, and stops us
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_with_parent, args=(parent.sentinel,), daemon=True).start()
    _shared = done, stop, busy, make_work()


def _exit_with_parent(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


def _process(item: Any, number: int) -> None:
    assert _shared is not None
    done, stop, busy, work = _shared

    def advance(count: int) -> None:
        if stop.value:
            raise StoppedError
        with done.get_lock():
            done.value += count

    busy[number] = True
    work(item, advance)
    busy[number] = False


def build(selection: Selection, output: Path, settings: Settings, progress: Progress) -> Summary:
    """Writes prepared data to `output`, or resumes the same preparation if it was stopped.

    The same input gives the same bytes for any number of workers. Raises `ConfigError` for invalid input or arguments,
    and `UserError` if the output cannot be written.
    """
    try:
        check_output(output)
        inputs, not_read = find_inputs(selection, output)
    except OSError as error:
        name = printable(str(error.filename))
        raise ConfigError(f"{name} cannot be read: {error.strerror}; check the path and its permissions") from error
    inputs, settings = decide_held_out(inputs, settings)
    check_kinds(inputs, settings)
    job = Job(inputs, cut_into_parts(inputs, settings), output, settings)
    try:
        with locked_output(output):
            check_plan(job)
            remove_leftovers(job.work)
            tokenizer = prepare_tokenizer(job, progress)
            job = _with_vocabulary(job, tokenizer)
            _prepare_parts(job, tokenizer, progress)
            check_unchanged(inputs)
            summary = commit(job, tokenizer, not_read)
            if not selection.eval_inputs:
                summary.held_out_by_name = [file.shown for file in inputs if file.split == "eval"]
            return summary
    except OSError as error:
        raise UserError(
            f"--output: {output} cannot be written: {error.strerror or error}; fix that and run the same command "
            "again: it continues with the parts that are not done"
        ) from error
    finally:
        remove_work(output)


def _with_vocabulary(job: Job, tokenizer: Tokenizer | None) -> Job:
    """Returns the job with the vocabulary size and end id of its tokenizer or token arrays. Raises `ConfigError`."""
    settings = job.settings
    end = settings.reading.end_id
    if tokenizer is not None:
        if end not in (None, tokenizer.end_of_document):
            own_end = "is not known" if tokenizer.end_of_document is None else f"is {tokenizer.end_of_document}"
            raise ConfigError(f"--end-id: the tokenizer's own end id {own_end}; name another by --end-token")
        end = tokenizer.end_of_document
        vocab = max(tokenizer.vocab_size, settings.vocab_size or 0)
    else:
        assert settings.vocab_size is not None
        vocab = settings.vocab_size
    if not 2 <= vocab <= MAX_VOCABULARY:
        raise ConfigError(f"--vocab-size: {vocab} is not the size of a vocabulary; give one from 2 to {MAX_VOCABULARY}")
    if end is not None and not 0 <= end < vocab:
        raise ConfigError(f"--end-id: {end} is not one of the vocabulary's ids, which are 0 to {vocab - 1}")
    reading = replace(settings.reading, end_id=end, vocab_size=vocab)
    return replace(job, settings=replace(settings, reading=reading))


def _prepare_parts(job: Job, tokenizer: Tokenizer | None, progress: Progress) -> None:
    total = sum(file.size for file in job.inputs)
    remaining = [part for part in job.parts if not job.record_path(part.number).exists()]
    done_before = sum(map(_input_bytes, job.parts)) - sum(map(_input_bytes, remaining))
    show = lambda done: progress("preparing", min(done_before + done, total), total)
    show(0)
    description = None if tokenizer is None else tokenizer.description
    run(remaining, partial(_make_work, job, description), job.settings.workers, show)
    progress("preparing", total, total)


def _make_work(job: Job, description: dict[str, Any] | None) -> Work:
    """Returns the function with which a worker prepares one part."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers already run in parallel
    tokenizer = None if description is None else make_tokenizer(description, job.output)
    return lambda part, advance: prepare_part(job, part, tokenizer, advance)


def _input_bytes(part: Part) -> int:
    """Returns the approximate bytes of input of a part."""
    return sum(
        piece.stop - piece.start if piece.file.kind in ("text", "jsonl") else piece.file.size for piece in part.pieces
    )
