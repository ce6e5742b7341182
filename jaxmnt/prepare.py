"""python -m jaxmnt.prepare: turn text, JSON lines, Parquet or token arrays into shards."""

import argparse
import time
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmnt.commands import LOCAL_EXIT_CODES, Parser, path_argument, run_command
from jaxmnt.distributed.container import cores
from jaxmnt.errors import ConfigError, ExitCode, counted, listed, printable

if TYPE_CHECKING:
    from jaxmnt.data.preparation.commit import Summary
    from jaxmnt.data.preparation.inputs import Settings
    from jaxmnt.telemetry.progress import StatusLine

_BAR_WIDTH = 24
"""Characters of the progress bar."""

_SHORT_DOCUMENT = 16
"""If the median document has fewer tokens, the end id is probably wrong."""

_FEW_HELD_OUT_TOKENS = 10_000
"""With fewer held-out tokens, the held-out loss is mostly noise."""

_MAX_DOCUMENT_MIB = 2**20
"""Maximum value of --max-document-mib."""

_MAX_ROW_LENGTH = 2**31 - 1

_MIN_RATE_SECONDS = 1.0
"""Time for which an activity must last before its rate and ETA are shown, because they are meaningless earlier."""

_EPILOG = """\
The name of an input determines its kind: .jsonl and .ndjson (also .gz and
.zst), .parquet, .npy and .bin (token arrays). All other files are text, and
each is one document. To resume an interrupted preparation, run the same
command again.
"""


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    if options.eval_fraction is not None and not 0 <= options.eval_fraction < 1:
        raise ConfigError(f"--eval-fraction: {options.eval_fraction:g} must be at least 0 and below 1, such as 0.02")
    if not 1 <= options.max_document_mib <= _MAX_DOCUMENT_MIB:
        raise ConfigError(f"--max-document-mib: {options.max_document_mib} must be from 1 to {_MAX_DOCUMENT_MIB}")
    if options.workers < 1:
        raise ConfigError(f"--workers: {options.workers} must be at least 1")

    from jaxmnt.config.load import as_typed
    from jaxmnt.data.preparation.inputs import Selection
    from jaxmnt.data.preparation.run import build
    from jaxmnt.telemetry.progress import status_line
    from jaxmnt.units import count, duration, size

    selection = Selection(options.input, options.suffix, options.exclude, options.eval_input)
    started = time.monotonic()
    try:
        with status_line() as status:
            progress = _Progress()
            show = partial(progress.show, status)
            summary = build(selection, options.output, _settings(options), show, options.chat_template)
    except KeyboardInterrupt:
        print(f"interrupted: run the same command again to continue with {options.output}")
        return ExitCode.STOPPED
    for split in ("train", "eval"):
        documents = counted(summary.documents[split], "document", "documents")
        print(f"{split:5}  {documents}, {count(summary.tokens[split])} tokens")
    seconds = time.monotonic() - started
    print(f"read   {size(progress.bytes_read)} in {duration(seconds)}, {size(progress.bytes_read / seconds)} a second")
    for line in [*_describe_split(summary, options.eval_fraction), *_describe_left_out(summary)]:
        print(line)
    for line in _describe_conversations(summary, options):
        print(line)
    output = str(options.output)
    print(f"prepared data is in {printable(output)}: train on it with {as_typed('data.path', output)}")
    return ExitCode.FINISHED


def _describe_split(summary: "Summary", requested_fraction: float | None) -> Iterator[str]:
    """Yields lines about how token arrays were cut into documents, and about which documents are held out.

    `requested_fraction` is the value of --eval-fraction.
    """
    if summary.array_documents:
        yield (
            f"the id {summary.end_id} cuts the token arrays into "
            f"{counted(summary.array_documents, 'document', 'documents')}, with a median of "
            f"{counted(summary.array_median, 'token', 'tokens')}"
        )
        if summary.array_median < _SHORT_DOCUMENT:
            yield (
                f"warning: documents this short suggest that {summary.end_id} is an ordinary token of the text; "
                "if no id separates documents, leave --end-id out, so that each file is one document"
            )
    if summary.whole_arrays:
        yield f"token arrays: {summary.whole_arrays}, each one document, because there is no --end-id"
    if summary.held_out_by_name:
        names = listed(summary.held_out_by_name, 3)
        yield f"held out because of their names: {names} (--eval-fraction 0 trains on all files)"
    yield from _warn_if_few_held_out(summary, requested_fraction)


def _warn_if_few_held_out(summary: "Summary", requested_fraction: float | None) -> Iterator[str]:
    """Yields a line if nothing is held out, or too little for a meaningful loss."""
    documents = summary.documents["eval"]
    tokens = summary.tokens["eval"]
    if tokens >= _FEW_HELD_OUT_TOKENS:
        return
    if tokens:
        yield (
            f"held out {counted(documents, 'document', 'documents')}, {counted(tokens, 'token', 'tokens')}: too little "
            "for a meaningful loss; give more files with --eval-input, or a larger share with --eval-fraction"
        )
    elif summary.eval_fraction:
        trained = summary.documents["train"]
        reason = "the only document did not fall" if trained == 1 else f"none of the {trained:,} documents fell"
        yield (
            f"nothing is held out: {reason} into the share of {summary.eval_fraction:g}; give files with --eval-input, "
            "or a larger share with --eval-fraction"
        )
    elif requested_fraction is None:
        yield "nothing is held out: give files with --eval-input, or a share with --eval-fraction"
    else:
        yield f"nothing is held out, because of --eval-fraction {requested_fraction:g}"


def _describe_conversations(summary: "Summary", options: argparse.Namespace) -> Iterator[str]:
    """Yields lines about the chat template, and the first conversation with its targets marked."""
    from jaxmnt.data.batch_contents import first_document
    from jaxmnt.data.inspection import labelled_lines
    from jaxmnt.data.manifest import CHATML

    chat = summary.chat
    if chat is None:
        return
    if chat.source == CHATML:
        template = "ChatML" + ("" if options.chat_template else ", because no chat template came with the tokenizer")
    else:
        template = f"the chat template of {printable(options.chat_template or options.tokenizer)}"
    targets = {"last": "last answers are targets", "all": "all text is a target"}.get(
        options.learn, "all answers are targets"
    )
    conversations = counted(summary.conversations, "conversation", "conversations")
    yield f"chat   {conversations} in {template}; {targets}; the first:"
    yield from labelled_lines(first_document(options.output))
    if summary.unprompted:
        yield (
            f"warning: {counted(summary.unprompted, 'answer does', 'answers do')} not follow the generation prompt of "
            "the template, with which generate --chat asks; they are learned from their content on"
        )
    if not chat.end_tokens:
        yield (
            "note: the template ends answers with no token of the tokenizer, so only the end of a document ends an "
            "answer"
        )
    if summary.crossing:
        yield (
            f"warning: {counted(summary.crossing, 'token crosses', 'tokens cross')} the boundary of a target. An "
            "answer cannot begin with such a token, because generate --chat encodes the prompt by itself; change the "
            "template so that the beginning of an answer ends with a special token or a line end"
        )


def _describe_left_out(summary: "Summary") -> Iterator[str]:
    """Yields lines about records and files that were left out, split or changed."""
    for reason in summary.left_out():
        yield f"left out {reason}"
    for remark in summary.remarks[:5]:
        yield f"  {remark}"
    if summary.split:
        yield f"split {counted(summary.split, 'document that was', 'documents that were')} too long"
    if summary.replaced:
        documents = counted(summary.replaced, "document is", "documents are")
        yield f"{documents} not valid UTF-8; the invalid bytes were replaced"


class _Progress:
    """Shows the progress of each activity, such as training the tokenizer.

    After one second of an activity it also shows the rate and the ETA, measured since the activity began.
    """

    def __init__(self) -> None:
        self.bytes_read = 0
        """Bytes of input that this process has prepared."""
        self._activity = ""
        self._started = 0.0
        """Time at which the activity began."""
        self._done_before = 0
        """Bytes that were done when the activity began, by an interrupted preparation."""

    def show(self, status: "StatusLine", activity: str, done: int, total: int) -> None:
        """Shows that `done` of `total` bytes of an activity are done, if an update is due."""
        from jaxmnt.data.preparation.run import PREPARING
        from jaxmnt.telemetry.progress import bar
        from jaxmnt.units import duration, size

        if activity != self._activity:
            self._activity = activity
            self._started = time.monotonic()
            self._done_before = done
        done_here = done - self._done_before
        if activity == PREPARING:
            self.bytes_read = done_here
        if not status.due or not done_here:
            return
        share = done / max(1, total)
        drawn = f"{bar(share, _BAR_WIDTH)} " if status.live else ""
        line = f"{activity} {drawn}{share:4.0%} of {size(total)}"
        seconds = time.monotonic() - self._started
        if seconds >= _MIN_RATE_SECONDS:
            rate = done_here / seconds
            line += f"  {size(rate)}/s  ETA {duration((total - done) / rate)}"
        status.update(line)


def _settings(options: argparse.Namespace) -> "Settings":
    from jaxmnt.data.manifest import BYTES
    from jaxmnt.data.preparation.inputs import ReadOptions, Settings

    default_tokenizer: str | None = BYTES
    if options.vocab_size is not None or options.train_tokenizer:
        default_tokenizer = None
    for name in ("learn", "chat_template", "chat_date"):
        if getattr(options, name) is not None and not options.chat:
            raise ConfigError(f"--{name.replace('_', '-')}: only conversations have one; add --chat")
    if options.chat_date is not None:
        try:
            date.fromisoformat(options.chat_date)
        except ValueError as error:
            raise ConfigError(
                f"--chat-date: {printable(options.chat_date)} is not a date; give one such as 2026-01-31"
            ) from error
    if options.train_tokenizer is not None and options.tokenizer is not None:
        raise ConfigError("--train-tokenizer: --tokenizer is also given; remove one of them")
    read_options = ReadOptions(
        text_field=options.text_field,
        chat=options.chat,
        learn=options.learn or "answers",
        chat_date=options.chat_date,
        ignored_fields=tuple(sorted(set(options.ignore_fields))),
        replace_invalid=options.replace_invalid,
        token_bytes={"uint16": 2, "uint32": 4}[options.token_dtype],
        end_id=options.end_id,
        max_document=options.max_document_mib * 2**20,
        long_documents=options.long_documents,
    )
    return Settings(
        tokenizer=options.tokenizer or default_tokenizer,
        end_token=options.end_token,
        train_tokenizer=options.train_tokenizer,
        reading=read_options,
        vocab_size=options.vocab_size,
        eval_fraction=options.eval_fraction,
        skip_bad=options.on_error == "skip",
        workers=options.workers,
        packed_lengths=_packed_lengths(options.packed_lengths),
    )


def _packed_lengths(lengths: list[int] | None) -> tuple[int, ...]:
    """Returns the row lengths of --packed-lengths, or the default lengths if the option is not given."""
    from jaxmnt.data.preparation.inputs import PACKED_LENGTHS

    if lengths is None:
        return PACKED_LENGTHS
    for length in lengths:
        if not 2 <= length <= _MAX_ROW_LENGTH:
            raise ConfigError(f"--packed-lengths: {length} is not the length of a row; give 2 to {_MAX_ROW_LENGTH}")
    return tuple(sorted(set(lengths)))


def _parse(arguments: list[str]) -> argparse.Namespace:
    codes = LOCAL_EXIT_CODES | {ExitCode.STOPPED: "interrupted: run the same command again to resume"}
    parser = Parser("python -m jaxmnt.prepare", description=__doc__, codes=codes, epilog=_EPILOG)
    add = parser.add_argument
    add_list = partial(parser.add_argument, action="extend")
    add_list("--input", nargs="+", type=Path, required=True, metavar="PATH", help="files and folders to read")
    add_list("--eval-input", nargs="+", type=Path, default=[], metavar="PATH", help="files and folders to hold out")
    add("--output", type=Path, required=True, help="folder to write")
    add_list("--suffix", nargs="*", default=[], help="read only files whose names end so, such as .txt")
    add_list("--exclude", nargs="*", default=[], help="names of files and folders to leave out (*, ?)")
    add("--tokenizer", type=path_argument, help="bytes (default), or a Hugging Face tokenizer.json or its folder")
    add("--train-tokenizer", type=int, metavar="N", help="train a byte-level BPE of N tokens on the input")
    add("--end-token", help="token that ends a document (default: <|endoftext|> or another common one)")
    add("--text-field", default="text", help="field or column that holds a document (text)")
    add("--chat", action="store_true", help="records hold conversations; answers are targets (--learn)")
    add(
        "--chat-template", type=path_argument, metavar="FILE",
        help="--chat: chatml, or a file (default: the template beside the tokenizer, else chatml)",
    )  # fmt: skip
    add("--learn", choices=("answers", "last", "all"), help="--chat: what is a target (answers)")
    add("--chat-date", metavar="DATE", help="--chat: date that the template writes as today's, such as 2026-01-31")
    add_list("--ignore-fields", nargs="+", default=[], metavar="NAME", help="--chat: fields that may be dropped")
    add("--vocab-size", type=int, help="token arrays: size of the vocabulary, without a --tokenizer")
    add("--end-id", type=int, help="token arrays: id that ends a document (default: each file is one document)")
    add("--token-dtype", choices=("uint16", "uint32"), default="uint16", help="type of .bin token arrays (uint16)")
    add("--eval-fraction", type=float, metavar="F", help="share of documents held out (0.02, or 0 with --eval-input)")
    add("--max-document-mib", type=int, default=64, metavar="N", help="largest record, line or cell, in MiB (64)")
    add(
        "--long-documents",
        choices=("error", "split", "skip"),
        default="error",
        help="what to do with documents that are larger (error); JSON is never split",
    )
    add("--on-error", choices=("stop", "skip"), default="stop", help="what to do with a record that is unusable (stop)")
    add("--replace-invalid", action="store_true", help="replace bytes that are not UTF-8 instead of refusing them")
    add_list(
        "--packed-lengths", nargs="*", type=int, metavar="N",
        help="lengths of packed rows to plan now, for data with many documents (4096)",
    )  # fmt: skip
    add("--workers", type=int, default=cores(), help="worker processes (one per core)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
