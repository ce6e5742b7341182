"""python -m jaxmnt.prepare: turn text, JSON lines, Parquet or token arrays into shards."""

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmnt.commands import LOCAL_EXIT_CODES, Parser, path_argument, run_command
from jaxmnt.distributed.container import cores
from jaxmnt.errors import ConfigError, ExitCode, counted, listed, printable
from jaxmnt.storage import read_all

if TYPE_CHECKING:
    from jaxmnt.data.preparation.inputs import Settings
    from jaxmnt.data.preparation.plan import Summary
    from jaxmnt.telemetry.progress import StatusLine

_BAR_WIDTH = 24
"""Characters of the progress bar."""

_SHORT_DOCUMENT = 16
"""Median tokens of documents below which the end id is probably wrong."""

_FEW_HELD_OUT_TOKENS = 10_000
"""Tokens below which a held-out loss is mostly noise."""

_LARGEST_MIB = 2**20

_EPILOG = """\
The name of an input determines its kind: .jsonl and .ndjson (also .gz and
.zst), .parquet, .npy and .bin (token arrays); all other files are text, one
document each. If it is interrupted, run the same command again to resume.
"""


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    if options.eval_fraction is not None and not 0 <= options.eval_fraction < 1:
        raise ConfigError(f"--eval-fraction: {options.eval_fraction:g} is not a share from 0 up to 1, such as 0.02")
    if not 1 <= options.max_document_mib <= _LARGEST_MIB:
        raise ConfigError(f"--max-document-mib: {options.max_document_mib} is out of range; give 1 to {_LARGEST_MIB}")
    if options.workers < 1:
        raise ConfigError(f"--workers: {options.workers} is not a number of processes; give 1 or more")

    from jaxmnt.config.load import as_typed
    from jaxmnt.data.preparation.inputs import Selection
    from jaxmnt.data.preparation.run import build
    from jaxmnt.telemetry.progress import status_line
    from jaxmnt.units import count, duration, size

    if options.chat and _has_chat_template(options.tokenizer):
        print(f"--chat writes ChatML, not the chat template that came with {printable(options.tokenizer)}")
    selection = Selection(options.input, options.suffix, options.exclude, options.eval_input)
    started = time.monotonic()
    try:
        with status_line() as status:
            rate = _Rate()
            summary = build(selection, options.output, _settings(options), partial(rate.show, status))
    except KeyboardInterrupt:
        print(f"interrupted: run the same command again to continue with {options.output}")
        return ExitCode.STOPPED
    for split in ("train", "eval"):
        documents = counted(summary.documents[split], "document", "documents")
        print(f"{split:5}  {documents}, {count(summary.tokens[split])} tokens")
    seconds = time.monotonic() - started
    print(f"read   {size(rate.done)} in {duration(seconds)}, {size(rate.done / seconds)} a second")
    for line in [*_describe_split(summary, options.eval_fraction), *_describe_left_out(summary)]:
        print(line)
    output = str(options.output)
    print(f"prepared data is in {printable(output)}: train on it with {as_typed('data.path', output)}")
    return ExitCode.FINISHED


def _describe_split(summary: "Summary", fraction: float | None) -> Iterator[str]:
    """Yields lines about how token arrays were cut into documents, and which documents are held out."""
    if summary.array_documents:
        yield (
            f"the id {summary.end_id} cuts the token arrays into "
            f"{counted(summary.array_documents, 'document', 'documents')}, of "
            f"{counted(summary.array_median, 'token', 'tokens')} in the median"
        )
        if summary.array_median < _SHORT_DOCUMENT:
            yield (
                f"warning: documents this short suggest that {summary.end_id} is an ordinary token of the text; "
                "leave --end-id out if no id separates documents; each file is then one document"
            )
    if summary.whole_arrays:
        yield f"token arrays: {summary.whole_arrays}, each one document, because no --end-id was given"
    if summary.named:
        yield f"held out because of their names: {listed(summary.named, 3)} (--eval-fraction 0 trains on all)"
    yield from _warn_if_few_held_out(summary, fraction)


def _warn_if_few_held_out(summary: "Summary", fraction: float | None) -> Iterator[str]:
    """Yields a line if nothing is held out, or too little for a meaningful loss."""
    documents, tokens = summary.documents["eval"], summary.tokens["eval"]
    share = summary.eval_fraction
    if tokens >= _FEW_HELD_OUT_TOKENS:
        return
    if tokens:
        yield (
            f"held out {counted(documents, 'document', 'documents')}, {counted(tokens, 'token', 'tokens')}: too little "
            "for a held-out loss to say much; name more files by --eval-input, or a larger share by --eval-fraction"
        )
    elif share:
        trained = summary.documents["train"]
        which = "the only document did not fall" if trained == 1 else f"none of the {trained:,} documents fell"
        yield (
            f"nothing is held out: {which} into the share of {share:g}; name files for it by --eval-input, or a "
            "larger share by --eval-fraction"
        )
    elif fraction is None:
        yield "nothing is held out: name files for it by --eval-input, or a share by --eval-fraction"
    else:
        yield f"nothing is held out, as --eval-fraction {fraction:g} says"


def _describe_left_out(summary: "Summary") -> Iterator[str]:
    """Yields lines about records and files that were left out, split or changed."""
    for reason in summary.left_out():
        yield f"left out {reason}"
    for remark in summary.remarks[:5]:
        yield f"  {remark}"
    if summary.split:
        yield f"split {counted(summary.split, 'document that is', 'documents that are')} too long"
    if summary.replaced:
        documents = counted(summary.replaced, "document is", "documents are")
        yield f"{documents} not valid UTF-8; the invalid bytes were replaced"


def _has_chat_template(tokenizer: str | None) -> bool:
    """Returns True if there is a chat template beside the tokenizer that the command line names."""
    from jaxmnt.data.chat_template import TEMPLATE_FILES, chat_template
    from jaxmnt.data.tokenizer import file_of_tokenizer

    if tokenizer is None or tokenizer == "bytes":
        return False
    folder = file_of_tokenizer(tokenizer).parent
    return chat_template(read_all(folder, [name for name in TEMPLATE_FILES if (folder / name).is_file()])) is not None


class _Rate:
    """Shows progress with a rate and an ETA, counted from the start of this call."""

    def __init__(self) -> None:
        self.done = 0
        """Bytes read by this call."""
        self._activity = ""
        self._start = (0.0, 0)
        """Time and bytes at the start of the activity."""

    def show(self, status: "StatusLine", activity: str, done: int, total: int) -> None:
        from jaxmnt.telemetry.progress import bar
        from jaxmnt.units import duration, size

        if activity != self._activity:
            self._activity, self._start = activity, (time.monotonic(), done)
        self.done = done - self._start[1]
        if not status.due:
            return
        since, before = self._start
        rate = (done - before) / max(1e-9, time.monotonic() - since)
        if rate:
            eta = duration((total - done) / rate)
            share = done / max(1, total)
            drawn = f"{bar(share, _BAR_WIDTH)} " if status.live else ""
            status.update(f"{activity} {drawn}{share:4.0%} of {size(total)}  {size(rate)}/s  ETA {eta}")


def _settings(options: argparse.Namespace) -> "Settings":
    from jaxmnt.data.preparation.inputs import Reading, Settings

    trained = options.train_tokenizer
    has_vocabulary = options.vocab_size is not None
    if trained is not None and options.tokenizer is not None:
        raise ConfigError("--train-tokenizer: --tokenizer is also given; remove one of them")
    reading = Reading(
        text_field=options.text_field,
        chat=options.chat,
        ignored_fields=tuple(sorted(set(options.ignore_fields))),
        replace_invalid=options.replace_invalid,
        token_bytes={"uint16": 2, "uint32": 4}[options.token_dtype],
        end_id=options.end_id,
        max_document=options.max_document_mib * 2**20,
        long_documents=options.long_documents,
    )
    return Settings(
        tokenizer=options.tokenizer or (None if has_vocabulary or trained else "bytes"),
        end_token=options.end_token,
        train_tokenizer=trained,
        reading=reading,
        vocab_size=options.vocab_size,
        eval_fraction=options.eval_fraction,
        skip_bad=options.on_error == "skip",
        workers=options.workers,
    )


def _parse(arguments: list[str]) -> argparse.Namespace:
    codes = LOCAL_EXIT_CODES | {ExitCode.STOPPED: "interrupted: the same command goes on from there"}
    parser = Parser("python -m jaxmnt.prepare", description=__doc__, codes=codes, epilog=_EPILOG)
    add, several = parser.add_argument, partial(parser.add_argument, action="extend")
    several("--input", nargs="+", type=Path, required=True, metavar="PATH", help="files, or folders of them")
    several("--eval-input", nargs="+", type=Path, default=[], metavar="PATH", help="files or folders that are held out")
    add("--output", type=Path, required=True, help="folder to write")
    several("--suffix", nargs="*", default=[], help="keep only files with these endings, such as .txt")
    several("--exclude", nargs="*", default=[], help="leave out files and folders of these names (*, ?)")
    add("--tokenizer", type=path_argument, help="bytes (default), or the path of a Hugging Face tokenizer.json")
    add("--train-tokenizer", type=int, metavar="N", help="train a byte-level BPE of N tokens on the input")
    add("--end-token", help="the token that ends a document (default: <|endoftext|> or another usual name)")
    add("--text-field", default="text", help="field or column that holds a document (text)")
    add("--chat", action="store_true", help="records hold conversations; only answers are learnt")
    several(
        "--ignore-fields", nargs="+", default=[], metavar="NAME", help="--chat: fields of records that may be dropped"
    )
    add("--vocab-size", type=int, help="token arrays: size of the vocabulary, without a --tokenizer")
    add("--end-id", type=int, help="token arrays: the id that ends a document (default: one document per file)")
    add("--token-dtype", choices=("uint16", "uint32"), default="uint16", help="type of .bin token arrays (uint16)")
    add("--eval-fraction", type=float, metavar="F", help="share of documents held out (0.02, or 0 with --eval-input)")
    add("--max-document-mib", type=int, default=64, metavar="N", help="largest record, line or cell, in MiB (64)")
    add(
        "--long-documents",
        choices=("error", "split", "skip"),
        default="error",
        help="what to do with larger ones (error); JSON is not split",
    )
    add(
        "--on-error", choices=("stop", "skip"), default="stop", help="what to do at a record that cannot be used (stop)"
    )
    add("--replace-invalid", action="store_true", help="replace bytes that are not UTF-8 instead of refusing them")
    add("--workers", type=int, default=cores(), help="worker processes (one per core)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
