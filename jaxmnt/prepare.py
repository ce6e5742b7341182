"""python -m jaxmnt.prepare: text, JSON lines, Parquet or token arrays to the shards that training reads."""

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmnt.commands import HERE, Parser
from jaxmnt.errors import ConfigError, ExitCode, run_command

if TYPE_CHECKING:
    from jaxmnt.data.preparation import Settings
    from jaxmnt.telemetry.progress import StatusLine

_BAR = 24
"""Characters of the progress bar."""

_EPILOG = """\
Inputs are told apart by their names: .jsonl and .ndjson (also .gz and .zst), .parquet, .npy and .bin (token arrays);
everything else is text, a file a document. Killed half-way, the same command goes on where it stopped.
"""


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    if not 0 <= options.eval_fraction < 1:
        raise ConfigError(f"--eval-fraction: {options.eval_fraction:g} is not a share from 0 up to 1, such as 0.02")
    if options.workers < 1:
        raise ConfigError(f"--workers: {options.workers} is no number of processes; give 1 or more")

    from jaxmnt.data.preparation import Selection, build
    from jaxmnt.telemetry.progress import count, duration, size, status_line

    selection = Selection(options.input, options.suffix, options.exclude)
    started = time.monotonic()
    try:
        with status_line() as status:
            rate = _Rate()
            summary = build(
                selection,
                options.output,
                _settings(options),
                lambda what, done, total: rate.show(status, what, done, total),
            )
    except KeyboardInterrupt:
        print(f"interrupted: give the same command again to go on with {options.output}")
        return ExitCode.STOPPED
    for split in ("train", "eval"):
        print(f"{split:5}  {summary.documents[split]:,} documents, {count(summary.tokens[split])} tokens")
    seconds = time.monotonic() - started
    print(f"read   {size(rate.done)} in {duration(seconds)}, {size(rate.done / seconds)} a second")
    for number, what in (
        (summary.skipped, "records that cannot be used"),
        (summary.empty, "empty documents"),
        (summary.binary, "binary files"),
    ):
        if number:
            print(f"left out {number} {what}")
    if summary.binary_names:
        print(f"  such as {', '.join(summary.binary_names[:3])}")
    for remark in summary.remarks[:5]:
        print(f"  {remark}")
    if summary.replaced:
        print(f"{summary.replaced} documents are not valid UTF-8; their odd bytes were replaced")
    print(f"prepared data is in {options.output}: train on it with data.path={options.output}")
    return ExitCode.FINISHED


class _Rate:
    """Progress with a rate and an ETA, counted from where this call began."""

    def __init__(self) -> None:
        self.done = 0
        """Bytes that this call has read."""
        self._what = ""
        self._first = (0.0, 0)

    def show(self, status: "StatusLine", what: str, done: int, total: int) -> None:
        from jaxmnt.telemetry.progress import duration, size

        if what != self._what:
            self._what, self._first = what, (time.monotonic(), done)
        self.done = done - self._first[1]
        if not status.due:
            return
        since, before = self._first
        rate = (done - before) / max(1e-9, time.monotonic() - since)
        if rate:
            eta = duration((total - done) / rate)
            share = done / max(1, total)
            bar = "█" * round(share * _BAR) + "░" * (_BAR - round(share * _BAR))
            status.update(f"{what} {bar} {share:4.0%} of {size(total)}  {size(rate)}/s  ETA {eta}")


def _settings(options: argparse.Namespace) -> "Settings":
    from jaxmnt.data.preparation import Settings
    from jaxmnt.data.preparation.document import Reading

    trained, own_ids = options.train_tokenizer, options.vocab_size is not None
    if trained is not None and options.tokenizer is not None:
        raise ConfigError("--train-tokenizer: --tokenizer is given, too; keep one of them")
    reading = Reading(
        text_field=options.text_field,
        chat=options.chat,
        replace_invalid=options.replace_invalid,
        token_bytes={"uint16": 2, "uint32": 4}[options.token_dtype],
        end_id=options.end_id,
    )
    return Settings(
        tokenizer=options.tokenizer or (None if own_ids or trained else "bytes"),
        end_token=options.end_token,
        train_tokenizer=trained,
        reading=reading,
        vocab_size=options.vocab_size,
        eval_fraction=options.eval_fraction,
        skip_bad=options.on_error == "skip",
        workers=options.workers,
    )


def _parse(arguments: list[str]) -> argparse.Namespace:
    codes = HERE | {ExitCode.STOPPED: "interrupted: the same command goes on from there"}
    parser = Parser("python -m jaxmnt.prepare", description=__doc__, codes=codes, epilog=_EPILOG)
    add = parser.add_argument
    add("--input", nargs="+", type=Path, required=True, help="files, or folders of them")
    add("--output", type=Path, required=True, help="folder to write")
    add("--suffix", nargs="*", default=[], help="keep only files with these endings, such as .txt")
    add("--exclude", nargs="*", default=[], help="leave out files and folders of these names (*, ?)")
    add("--tokenizer", help="bytes (default), or the path of a Hugging Face tokenizer.json")
    add("--train-tokenizer", type=int, metavar="N", help="train a byte-level BPE of N tokens on the input")
    add("--end-token", help="the token that ends a document (default: <|endoftext|> or another usual name)")
    add("--text-field", default="text", help="field or column that holds a document (text)")
    add("--chat", action="store_true", help="records hold messages, or prompt and completion; only answers are learnt")
    add("--vocab-size", type=int, help="token arrays: how many ids there are, if no --tokenizer says it")
    add("--end-id", type=int, help="token arrays: the id that ends a document")
    add("--token-dtype", choices=("uint16", "uint32"), default="uint16", help="of .bin token arrays (uint16)")
    add("--eval-fraction", type=float, default=0.02, help="share of documents held out (0.02)")
    add("--on-error", choices=("stop", "skip"), default="stop", help="at a record that cannot be used (stop)")
    add("--replace-invalid", action="store_true", help="replace bytes that are not UTF-8; they are no error then")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (one a core)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
