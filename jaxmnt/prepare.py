"""python -m jaxmnt.prepare: text files to tokenized shards that training reads."""

import argparse
from pathlib import Path

from jaxmnt.errors import ConfigError, ExitCode, run_command


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    from jaxmnt.data.build import build, find_files
    from jaxmnt.data.tokenizer import make_tokenizer
    from jaxmnt.telemetry.progress import count, status_line

    if not 0 <= options.eval_fraction < 1:
        raise ConfigError(f"--eval-fraction: {options.eval_fraction:g} is not a share from 0 up to 1, such as 0.02")
    tokenizer = make_tokenizer({"name": options.tokenizer})
    files = find_files(options.input, options.suffix, options.exclude)
    with status_line() as status:
        summary = build(
            files,
            options.output,
            tokenizer,
            options.eval_fraction,
            lambda done, total: status.update(f"preparing: {done} of {total} files"),
        )
    for split in ("train", "eval"):
        print(f"{split:5}  {summary.documents[split]:,} documents, {count(summary.tokens[split])} tokens")
    if summary.binary_files:
        print(f"left out {summary.binary_files} binary files")
    if summary.replaced_files:
        print(f"{summary.replaced_files} files are not valid UTF-8; their odd bytes were replaced")
    print(f"prepared data is in {options.output}: train on it with data.path={options.output}")
    return ExitCode.FINISHED


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m jaxmnt.prepare", description=__doc__, allow_abbrev=False)
    parser.add_argument("--input", nargs="+", type=Path, required=True, help="text files or folders of them")
    parser.add_argument("--output", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--suffix", nargs="*", default=[], help="keep only files with these endings, such as .txt")
    parser.add_argument("--exclude", nargs="*", default=[], help="leave out files and folders of these names (*, ?)")
    parser.add_argument("--tokenizer", default="bytes", help="bytes (default): UTF-8 bytes")
    parser.add_argument("--eval-fraction", type=float, default=0.02, help="share of documents held out (0.02)")
    parser.add_argument("--debug", action="store_true", help="show a traceback with an error")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
