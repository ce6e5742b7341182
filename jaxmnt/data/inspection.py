"""Formats the data that a config reads: tables of the sources, and the rows of a batch with their documents."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from jaxmnt.config.schema import Config
from jaxmnt.data.batch_contents import Extract, Row, Span
from jaxmnt.data.batches import TrainingData
from jaxmnt.data.grain_source import GrainData
from jaxmnt.data.order import block_shares
from jaxmnt.data.sources import Sources, on_end, phases
from jaxmnt.data.store import PreparedData
from jaxmnt.errors import counted, printable
from jaxmnt.units import size

_BAR_WIDTH = 40
_MAX_TEXT_WIDTH = 60
_PERCENTILES = (0, 10, 50, 90, 99, 100)


def verify_sources(sources: Sources, progress: Callable[[str], None]) -> list[str]:
    """Compares every file with its digest, reads every element of Grain datasets, and returns lines about the results.

    Raises `ConfigError` for the first file or element that has changed.
    """
    sizes, lines = [], []
    for name, part in (*sources.parts.items(), *sources.eval_sets.items()):
        part.verify(progress=progress)
        if isinstance(part, PreparedData):
            sizes += [(part.path / file).stat().st_size for file, _ in part.files()]
        elif isinstance(part, GrainData):
            lines.append(f"verified every element of the Grain dataset of {name}: all can be read and are unchanged")
    if sizes:
        files = counted(len(sizes), "file", "files")
        lines.insert(0, f"verified {files}, {size(sum(sizes))}: all match the manifest")
    return lines or ["verified nothing: synthetic data has no files"]


def sources_table(sources: Sources) -> list[str]:
    """Returns a table of what the manifests say about each split of each source."""
    rows = [("source", "split", "documents", "tokens", "shards", "held out", "tokenizer", "vocabulary", "path")]
    for name, part in sources.parts.items():
        for split in ("train", "eval"):
            shards, fraction = "–", "–"
            if isinstance(part, PreparedData):
                shards = str(len(part.manifest["splits"][split]["shards"]))
                fraction = f"{part.manifest['eval_fraction']:g}"
            rows.append(
                (
                    name, split, f"{part.documents(split):,}", f"{part.tokens(split):,}", shards, fraction,
                    str(part.tokenizer["name"]), f"{part.vocab_size:,}", str(part.path),
                )
            )  # fmt: skip
    return _table(rows) + [
        f"{name}: prepared by an earlier version, which did not seal its manifest"
        for name, part in sources.parts.items()
        if isinstance(part, PreparedData) and not part.is_sealed
    ]


def mixture_table(config: Config, training: TrainingData) -> list[str]:
    """Returns a table of each source's share of the rows, and of the number of epochs that the run reads from it."""
    settings, names = config.data, training.names
    rows = [("source", f"{settings.rows} an epoch", "fill", "share of rows", "epochs in the run", "at the end")]
    shares = [block_shares(phase.weights) for phase in phases(settings)]
    epochs = training.order.epochs(config.train.steps)
    for number, name in enumerate(names):
        share_by_phase = " → ".join(f"{share[number] / 10:.1f} %" for share in shares)
        reader = training.readers[name]
        rows.append(
            (
                name,
                f"{reader.rows:,}",
                f"{reader.fill:.4f}",
                share_by_phase,
                f"{epochs[name]:.3f}",
                on_end(settings, name),
            )
        )
    return _table(rows)


def length_lines(sources: Sources) -> Iterator[str]:
    """Yields percentiles and a histogram of the document lengths of each source. Lengths include the end of
    document."""
    for name, part in sources.parts.items():
        if isinstance(part, GrainData) and part.holds_rows:
            continue
        stream = part.stream("train")
        sizes = np.diff(np.append(stream.document_starts, stream.tokens))
        percentiles = np.percentile(sizes, _PERCENTILES).astype(int).tolist()
        shown = "  ".join(f"{p} %: {size:,}" for p, size in zip(_PERCENTILES, percentiles, strict=True))
        yield f"document lengths of {name} in tokens (mean {sizes.mean():,.0f}): {shown}"
        counts = np.bincount(np.log2(sizes).astype(int))
        for power in np.flatnonzero(counts).tolist():
            bar = "█" * max(1, round(_BAR_WIDTH * counts[power] / counts.max()))
            yield f"  {2**power:>10,} – {2 ** (power + 1) - 1:<10,} {counts[power]:>10,}  {bar}"


def batch_lines(rows: Iterable[Row], *, full: bool) -> Iterator[str]:
    """Yields lines about the rows of a batch, with the beginning of each document; if `full`, with all text and
    targets."""
    for row in rows:
        tokens = sum(extract.tokens for extract in row.extracts)
        yield (
            f"row {row.row}: {row.source}, {row.kind} {row.number:,} of epoch {row.epoch}, "
            f"{counted(row.targets, 'target', 'targets')} of {counted(tokens, 'token', 'tokens')}"
        )
        for extract in row.extracts:
            where = _origin_text(extract, full=full)
            if not full:
                where += _beginning(extract)
            if extract.document is None:
                yield f"  {where}"
            else:
                yield (
                    f"  {extract.place:>6}  {extract.tokens:>6} tokens from {extract.first:,} of document "
                    f"{extract.document:,}  {where}"
                )
            if full:
                yield from labelled_lines(extract.spans)


def _origin_text(extract: Extract, *, full: bool) -> str:
    """Returns the file and record of an extract; if `full`, also the line in the text of the record."""
    file = printable(extract.file)
    if extract.record_unit == "file":
        return file if extract.line is None else f"{file} line {extract.line:,}"
    record = f":{extract.record}" if extract.record_unit == "line" else f" {extract.record_unit} {extract.record:,}"
    line = f", line {extract.line:,} of its text" if full and extract.line is not None else ""
    return f"{file}{record}{line}"


def _beginning(extract: Extract) -> str:
    """Returns the beginning of the text of an extract, quoted and after spaces; empty without a tokenizer."""
    if any(span.text is None for span in extract.spans):
        return ""
    text = repr("".join(str(span.text) for span in extract.spans))
    return f"  {text if len(text) <= _MAX_TEXT_WIDTH else f'{text[: _MAX_TEXT_WIDTH - 2]}…{text[-1]}'}"


def labelled_lines(spans: Iterable[Span]) -> Iterator[str]:
    """Yields the lines of a text, labelled `learns` if they are targets and `reads` if they are not."""
    for span in spans:
        text = " ".join(map(str, span.ids)) if span.text is None else span.text
        for number, line in enumerate(text.splitlines() or [""]):
            label = "" if number else "learns" if span.learned else "reads"
            yield f"  {label:>6} │ {printable(line)}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    align = [">" if all(map(_is_number, column[1:])) else "<" for column in columns]
    return ["  ".join(f"{cell:{a}{w}}" for cell, a, w in zip(row, align, widths, strict=True)).rstrip() for row in rows]


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").isdigit()
