"""python -m jaxmnt.data: show the data that a config reads, down to the rows of one step and their documents.

--batch shows only the rows of that step. --verify alone shows only the manifests and the verified files.
`python -m jaxmnt.data index --path DIR` writes the index of data with many documents.
"""

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxmnt.commands import LOCAL_EXIT_CODES, Parser, path_argument, run_command
from jaxmnt.distributed.container import cores
from jaxmnt.errors import ConfigError, ExitCode, UserError, counted, printable, remark
from jaxmnt.telemetry.progress import Work, status_line, working

if TYPE_CHECKING:
    from jaxmnt.config.schema import Config
    from jaxmnt.data.sources import Sources


_INDEX_DESCRIPTION = """\
python -m jaxmnt.data index: write where the documents of prepared data start, and how packed rows hold them.

A run reads these files instead of computing their contents at its start. It writes those that are missing itself, on
one core; this command uses all cores.
"""


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["index"]:
        return _index(_parse_index(arguments[1:]))
    options = _parse(arguments)
    with working("starting") as work:
        return _show(options, work)


def _index(options: argparse.Namespace) -> int:
    """Writes the indices of prepared data that are missing."""
    from functools import partial

    from jaxmnt.data.index import MAX_DOCUMENTS_WITHOUT_INDEX, IndexKey
    from jaxmnt.data.index_files import write_indices
    from jaxmnt.data.manifest import SPLITS
    from jaxmnt.data.preparation.run import run_windows
    from jaxmnt.data.store import open_prepared

    prepared = open_prepared(options.path, "--path")
    prepared.check()
    lengths = options.lengths or [None]
    keys = [IndexKey(split, length, options.long_documents == "skip") for split in SPLITS for length in lengths]
    with status_line() as status:
        show_share = lambda activity, done, total: status.update(f"{activity} {done / max(1, total):4.0%}")
        run_tasks = partial(run_windows, workers=options.workers, progress=show_share)
        try:
            written = write_indices(prepared, keys, status.update, run_tasks)
        except OSError as error:
            raise UserError(
                f"--path: the index in {prepared.path} cannot be written: {error.strerror or error}; fix that, or run "
                "this command as a user who may write there"
            ) from error
    for path in written:
        print(f"wrote {printable(str(path))}")
    if not written:
        most = max(prepared.documents(split) for split in SPLITS)
        needs_none = most <= MAX_DOCUMENTS_WITHOUT_INDEX
        print(
            f"nothing to write: {counted(most, 'document needs', 'documents need')} no index"
            if needs_none
            else "nothing to write: the data has these indices"
        )
    return ExitCode.FINISHED


def _show(options: argparse.Namespace, work: Work) -> int:
    from jaxmnt.config.load import apply_overrides, as_override, load_config, parse_config
    from jaxmnt.data import inspection
    from jaxmnt.data.sources import open_sources

    if options.config is None:
        tree = {"data": {"path": options.path}}
        apply_overrides(tree, options.overrides)
        config = parse_config(tree, "command line")
    else:
        path_setting = [as_override("data.path", options.path)] if options.path else []
        config = load_config(options.config, [*path_setting, *options.overrides])
    sources = open_sources(config.data, config.run.dir)
    if options.verify:
        work.does("")
        with status_line(quiet=options.json) as status:
            report = inspection.verify_sources(sources, lambda name: status.update(f"checking {name}"))
        if options.batch is None and options.rows is None and not options.full and not options.json:
            print("\n".join([*inspection.sources_table(sources), "", *report]))
            return ExitCode.FINISHED
        for line in report:
            remark(line)
    _show_rows(options, config, sources, work)
    return ExitCode.FINISHED


def _show_rows(options: argparse.Namespace, config: "Config", sources: "Sources", work: Work) -> None:
    """Prints the rows of a step; without --batch, prints the tables of the sources before them."""
    from jaxmnt.data import inspection
    from jaxmnt.data.batch_contents import rows_of, to_json
    from jaxmnt.data.batches import TrainingData
    from jaxmnt.data.rows import batch_digest, row_digests
    from jaxmnt.data.tokenizer import make_tokenizer
    from jaxmnt.run.rundir import branches_of
    from jaxmnt.strict_json import json_text

    work.does("reading the data")
    training = TrainingData(config, sources, branches_of(config))
    first = training.order.first_step + 1
    step = first if options.batch is None else options.batch
    for name, number, minimum in (("--batch", step, first), ("--rows", options.rows, 1)):
        if number is not None and not minimum <= number < 2**40:
            hint = "; earlier steps belong to the run from which this one branches off" if minimum > 1 else ""
            raise ConfigError(f"{name}: {number} is out of range; give {minimum} or more, as in metrics.jsonl{hint}")
    tokenizer = make_tokenizer(sources.tokenizer, sources.folder) if sources.is_text else None
    size = config.data.global_batch_size
    limit = options.rows or (size if options.batch else 3)
    rows = rows_of(config, sources, training, tokenizer, step, limit)
    digest = batch_digest(row_digests(training.batch(step - 1, range(size))["tokens"]))
    work.does("")
    _warn_if_after_last_step(options, config, step)
    if options.json:
        print(json_text({"step": step, "batch_digest": digest, "rows": [to_json(row) for row in rows]}))
        return
    heading = f"batch of step {step}: {counted(size, 'row', 'rows')}, batch_digest {digest}"
    omitted_rows = [f"({size - limit} more rows; --rows shows more)"] if limit < size else []
    batch = [heading, *inspection.batch_lines(rows, full=options.full), *omitted_rows]
    tables: list[Iterable[str]] = []
    if options.batch is None:
        mixture = inspection.mixture_table(config, training)
        tables = [inspection.sources_table(sources), inspection.length_lines(sources), mixture]
    print("\n\n".join("\n".join(section) for section in [*tables, batch]))


def _warn_if_after_last_step(options: argparse.Namespace, config: "Config", step: int) -> None:
    """Prints a remark if a run of this config ends before the step. Without a config, it does so only if train.steps is
    set."""
    last = config.train.steps
    if step > last and (options.config is not None or "steps" in config.train.model_fields_set):
        remark(f"step {step:,} is after the last step of the run, because train.steps is {last:,}")


def _parse_index(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.data index", description=_INDEX_DESCRIPTION, codes=LOCAL_EXIT_CODES)
    add = parser.add_argument
    add("--path", type=path_argument, metavar="DIR", required=True, help="prepared data")
    add("--lengths", type=int, nargs="+", metavar="N", help="lengths of packed rows (data.sequence_length) to plan")
    add("--long-documents", choices=("cut", "skip"), default="cut", help="as data.long_documents (cut)")
    add("--workers", type=int, default=cores(), help="worker processes (one per core)")
    options = parser.parse_args(arguments)
    for name, numbers, minimum in (("--lengths", options.lengths or [], 2), ("--workers", [options.workers], 1)):
        for number in numbers:
            if not minimum <= number < 2**31:
                raise ConfigError(f"{name}: {number} is out of range; give {minimum} or more")
    return options


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.data", description=__doc__, codes=LOCAL_EXIT_CODES)
    add = parser.add_argument
    add("--config", type=path_argument, metavar="FILE", help="YAML config file")
    add("--path", type=path_argument, metavar="DIR", help="prepared data, instead of a config")
    add("--batch", type=int, metavar="STEP", help="show only the rows of this step, counted as in metrics.jsonl")
    add("--rows", type=int, metavar="N", help="show at most N rows (3; all with --batch)")
    add("--full", action="store_true", help="show all text of the rows, and which parts are targets")
    add("--json", action="store_true", help="print only the rows, as JSON with token ids")
    add("--verify", action="store_true", help="compare every file with its digest; alone, it shows no rows")
    parser.add_settings()
    options = parser.parse_intermixed_args(arguments)
    if options.config is None and options.path is None:
        raise ConfigError("give --config FILE or --path DIR")
    return options


if __name__ == "__main__":
    run_command(main)
