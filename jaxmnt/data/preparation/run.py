"""Prepares data: first makes the tokenizer, then prepares the parts in worker processes, then commits the result."""

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
from jaxmnt.data.attempts import remove_leftovers
from jaxmnt.data.index_files import Window, Work
from jaxmnt.data.manifest import BYTES, MAX_VOCABULARY, TOKENIZER_FILE
from jaxmnt.data.preparation.commit import Summary, commit
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
from jaxmnt.data.preparation.markup import with_chat_format
from jaxmnt.data.preparation.part import Job, documents_with_split, prepare_part
from jaxmnt.data.preparation.plan import check_output, check_plan, locked_output, remove_work, with_stored_sizes
from jaxmnt.data.tokenizer import Tokenizer, choose_tokenizer, file_of_tokenizer, make_tokenizer, train_bpe
from jaxmnt.errors import ConfigError, UserError, printable
from jaxmnt.storage import publish

_MAX_TRAINING_CHARACTERS = 2**28
"""Maximum number of characters on which a tokenizer is trained. They are taken evenly from all parts."""

PREPARING = "preparing"
"""Name of the activity in which all input is read."""

Progress = Callable[[str, int, int], None]
"""Function that is called with the current activity, the number of bytes done, and the total number of bytes."""


def prepare_tokenizer(job: Job, progress: Progress) -> Tokenizer | None:
    """Returns the tokenizer, and writes its file into the output. Returns None for token arrays without a tokenizer."""
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
    if settings.tokenizer != BYTES and not target.exists():
        # Read the file as bytes, because reading it as text could change line ends.
        publish(target, storage.read(file_of_tokenizer(settings.tokenizer)).decode())
    return tokenizer


def check_kinds(inputs: list[Input], settings: Settings) -> None:
    """Raises `ConfigError` unless the kinds of the inputs match the settings.

    Text requires a tokenizer, token arrays require a tokenizer or a vocabulary size, and conversations require records.
    """
    arrays = [file for file in inputs if file.kind == "tokens"]
    texts = [file for file in inputs if file.kind != "tokens"]
    if texts and settings.tokenizer is None and settings.train_tokenizer is None:
        raise ConfigError(
            f"--tokenizer: {texts[0].printable_path} is text, which needs a tokenizer; give --tokenizer, or leave "
            "--vocab-size out to use the default tokenizer, bytes"
        )
    has_other_than_bytes = settings.tokenizer not in (None, BYTES) or settings.train_tokenizer is not None
    if arrays and not has_other_than_bytes and not settings.vocab_size:
        raise ConfigError(
            f"--input: {arrays[0].printable_path} is a token array; give --vocab-size (and --end-id, if an id "
            "separates documents), or the --tokenizer that made it"
        )
    without_records = [file for file in inputs if file.kind in ("text", "tokens")]
    if settings.reading.chat and without_records:
        raise ConfigError(
            f"--chat: {without_records[0].printable_path} holds no records; give JSON lines or Parquet, or select "
            "only such files with --suffix"
        )


def _train(job: Job, vocab_size: int, progress: Progress) -> str:
    """Trains a BPE tokenizer on the training documents, with the same maximum number of characters from each part."""
    if vocab_size < 300:
        raise ConfigError(
            f"--train-tokenizer: {vocab_size} leaves too little room for tokens in addition to the 256 bytes; give at "
            "least 300"
        )
    if not any(file.size for file in job.inputs if file.kind != "tokens"):
        raise ConfigError("--train-tokenizer: the input has no text to train on; give files with text")
    if any(file.kind == "tokens" for file in job.inputs):
        raise ConfigError(
            "--train-tokenizer: token arrays contain tokens of a different tokenizer; prepare them separately"
        )
    characters_per_part = max(_MAX_TRAINING_CHARACTERS // max(1, len(job.parts)), 1)
    total = min(sum(file.size for file in job.inputs), _MAX_TRAINING_CHARACTERS)
    done = 0

    def texts(part: Part) -> Iterator[str]:
        nonlocal done
        characters = 0
        for split, document in documents_with_split(job, part):
            for segment in document.segments:
                if isinstance(segment.content, str) and not segment.markup:
                    characters += len(segment.content)
                    done += len(segment.content)
                    progress("training the tokenizer", min(done, total), total)
                    if split != "eval":
                        yield segment.content
                    if characters >= characters_per_part:
                        return

    return train_bpe(chain.from_iterable(map(texts, job.parts)), vocab_size)


_POLL_SECONDS = 0.2

_START_BYTES = 8
"""Number of bytes in which the index stores where a document starts."""


class StoppedError(Exception):
    """Raised in a worker whose result is no longer needed."""


_shared: tuple[Any, Any, Any, Work] | None = None
"""State of a worker process: number of bytes done, stop flag, busy flag of each task, and the work function."""


def run(
    tasks: Sequence[Any],
    make_work: Callable[[], Work],
    workers: int,
    progress: Callable[[int], None],
) -> None:
    """Processes all tasks in worker processes, and calls `progress` with the number of bytes done so far.

    `make_work`, which returns the work function, is called once in every worker. It must be picklable, and so must the
    tasks. With one worker, all work happens in this process. The first error stops all workers. If a worker dies, the
    `UserError` names the tasks in progress.
    """
    if workers == 1 or len(tasks) < 2:
        _run_in_process(tasks, make_work(), progress)
        return
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    stop = context.Value("b", 0)
    busy = context.Array("b", len(tasks))
    pool = ProcessPoolExecutor(min(workers, len(tasks)), context, _start_worker, (done, stop, busy, make_work))
    try:
        pending = {pool.submit(_process, task, number) for number, task in enumerate(tasks)}
        while pending:
            finished, pending = wait(pending, _POLL_SECONDS, FIRST_COMPLETED)
            progress(done.value)
            for future in finished:
                future.result()
    except BrokenProcessPool as error:
        names = ", ".join(str(task) for task, is_busy in zip(tasks, busy[:], strict=True) if is_busy)
        raise UserError(
            f"a worker was killed; work in progress: {names or 'none yet'}; memory may have run out, or a file may "
            "be damaged; run the same command again with fewer --workers, or leave the file out with --exclude, and it "
            "continues with the parts that are not done"
        ) from error
    finally:
        stop.value = 1
        pool.shutdown(cancel_futures=True)


def _run_in_process(tasks: Sequence[Any], work: Work, progress: Callable[[int], None]) -> None:
    total = 0

    def advance(count: int) -> None:
        nonlocal total
        total += count
        progress(total)

    for task in tasks:
        work(task, advance)


def _start_worker(done: Any, stop: Any, busy: Any, make_work: Callable[[], Work]) -> None:
    global _shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent also receives the signal, and stops this process
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_with_parent, args=(parent.sentinel,), daemon=True).start()
    _shared = done, stop, busy, make_work()


def _exit_with_parent(sentinel: int) -> None:
    """Waits until the parent process has ended, and then exits this process."""
    connection.wait([sentinel])
    os._exit(1)


def _process(task: Any, number: int) -> None:
    """Processes the task with this number in a worker process."""
    assert _shared is not None
    done, stop, busy, work = _shared

    def advance(count: int) -> None:
        if stop.value:
            raise StoppedError
        with done.get_lock():
            done.value += count

    busy[number] = True
    work(task, advance)
    busy[number] = False


def build(
    selection: Selection, output: Path, settings: Settings, progress: Progress, chat_template: str | None = None
) -> Summary:
    """Writes prepared data to `output`. If the same preparation was stopped earlier, it is resumed.

    `chat_template` is the value of --chat-template.

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
    settings = with_stored_sizes(with_chat_format(settings, chat_template), output)
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
            run_tasks = partial(run_windows, workers=settings.workers, progress=progress)
            summary = commit(job, tokenizer, not_read, run_tasks)
            if not selection.eval_inputs:
                summary.held_out_by_name = [file.printable_path for file in inputs if file.split == "eval"]
            return summary
    except OSError as error:
        raise UserError(
            f"--output: {output} cannot be written: {error.strerror or error}; fix that and run the same command "
            "again, and it continues with the parts that are not done"
        ) from error
    finally:
        remove_work(output)


def _with_vocabulary(job: Job, tokenizer: Tokenizer | None) -> Job:
    """Returns the job with the vocabulary size and end id of its tokenizer or token arrays. Raises `ConfigError`."""
    settings = job.settings
    end_id = settings.reading.end_id
    if tokenizer is not None:
        if end_id not in (None, tokenizer.end_of_document):
            own_end = "is not known" if tokenizer.end_of_document is None else f"is {tokenizer.end_of_document}"
            raise ConfigError(f"--end-id: the tokenizer's own end id {own_end}; name another with --end-token")
        end_id = tokenizer.end_of_document
        vocab_size = max(tokenizer.vocab_size, settings.vocab_size or 0)
    else:
        assert settings.vocab_size is not None
        vocab_size = settings.vocab_size
    if not 2 <= vocab_size <= MAX_VOCABULARY:
        raise ConfigError(f"--vocab-size: {vocab_size} must be from 2 to {MAX_VOCABULARY}")
    if end_id is not None and not 0 <= end_id < vocab_size:
        raise ConfigError(f"--end-id: {end_id} is not one of the vocabulary's ids, which are 0 to {vocab_size - 1}")
    read_options = replace(settings.reading, end_id=end_id, vocab_size=vocab_size)
    return replace(job, settings=replace(settings, reading=read_options))


def _prepare_parts(job: Job, tokenizer: Tokenizer | None, progress: Progress) -> None:
    """Prepares the parts that are not done yet."""
    total = sum(file.size for file in job.inputs)
    remaining = [part for part in job.parts if not job.record_path(part.number).exists()]
    done_before = sum(map(_input_bytes, job.parts)) - sum(map(_input_bytes, remaining))
    show_progress = lambda done: progress(PREPARING, min(done_before + done, total), total)
    show_progress(0)
    description = None if tokenizer is None else tokenizer.description
    run(remaining, partial(_make_work, job, description), job.settings.workers, show_progress)
    progress(PREPARING, total, total)


def run_windows(windows: Sequence[Window], make_work: Callable[[], Work], *, workers: int, progress: Progress) -> None:
    """Plans windows of documents in worker processes. Progress is counted in bytes of document starts."""
    total = sum(window.documents for window in windows) * _START_BYTES
    show_progress = lambda documents: progress("indexing", min(documents * _START_BYTES, total), total)
    show_progress(0)
    run(windows, make_work, workers, show_progress)


def _make_work(job: Job, description: dict[str, Any] | None) -> Work:
    """Returns the function with which a worker prepares one part."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers already run in parallel
    tokenizer = None if description is None else make_tokenizer(description, job.output)
    return lambda part, advance: prepare_part(job, part, tokenizer, advance)


def _input_bytes(part: Part) -> int:
    """Returns the approximate number of bytes of a part's input."""
    return sum(
        piece.stop - piece.start if piece.file.kind in ("text", "jsonl") else piece.file.size for piece in part.pieces
    )
