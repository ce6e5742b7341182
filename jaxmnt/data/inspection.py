"""What a config feeds, for a person: tables of the sources, and the rows of a batch with the documents in them."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxmnt.config.schema import Config
from jaxmnt.data.batches import TrainingData
from jaxmnt.data.elements import GivenRows
from jaxmnt.data.grain_source import GrainData
from jaxmnt.data.order import block_shares
from jaxmnt.data.rows import Packed, batch_digest, row_digests
from jaxmnt.data.sources import Sources, on_end, phases
from jaxmnt.data.store import PreparedData
from jaxmnt.data.text_pieces import LONGEST_CONTEXT, decode_after
from jaxmnt.data.tokenizer import Tokenizer
from jaxmnt.errors import counted, printable

_BAR = 40
_WIDTH = 60
_PERCENTILES = (0, 10, 50, 90, 99, 100)


def sources_table(sources: Sources) -> list[str]:
    """The manifest of each source."""
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
    """What each source gives: its share of the rows, and the epochs that the run takes of it."""
    settings, names = config.data, training.names
    rows = [("source", f"{settings.rows} an epoch", "fill", "share of rows", "epochs in the run", "at the end")]
    shares = [block_shares(phase.weights) for phase in phases(settings)]
    epochs = training.order.epochs(config.train.steps)
    for number, name in enumerate(names):
        changing = " → ".join(f"{share[number] / 10:.1f} %" for share in shares)
        reader = training.readers[name]
        rows.append(
            (name, f"{reader.rows:,}", f"{reader.fill:.4f}", changing, f"{epochs[name]:.3f}", on_end(settings, name))
        )
    return _table(rows)


def lengths(sources: Sources) -> Iterator[str]:
    """How long the documents of each source are, with their ends, as percentiles and a histogram."""
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
            bar = "█" * max(1, round(_BAR * counts[power] / counts.max()))
            yield f"  {2**power:>10,} – {2 ** (power + 1) - 1:<10,} {counts[power]:>10,}  {bar}"


def batch(
    config: Config, sources: Sources, training: TrainingData, tokenizer: Tokenizer | None, step: int, limit: int
) -> Iterator[str]:
    """The rows of the batch that the update number `step` (1 is the first) is made of, as metrics.jsonl counts."""
    everyone = range(config.data.global_batch_size)
    located = training.order.locate(step - 1, everyone)
    tokens = training.batch(step - 1, everyone)
    digest = batch_digest(row_digests(tokens["tokens"]))
    yield f"batch of step {step}: {counted(len(everyone), 'row', 'rows')}, batch_digest {digest}"
    for row in everyone[:limit]:
        name = training.names[located.source[row]]
        reader, number = training.readers[name], located.row[row]
        kind = "packed" if isinstance(reader, Packed) else "row" if isinstance(reader, GivenRows) else "window"
        targets = (tokens["weights"][row] > 0).sum()
        yield (
            f"row {row}: {name}, {kind} {number:,} of epoch {located.epoch[row] + 1}, "
            f"{targets} targets of {config.data.sequence_length}"
        )
        part = sources.parts[name]
        if isinstance(reader, GivenRows):
            origin, text = part.origin("train", number), _decoded(tokenizer, tokens["targets"][row])
            yield f"  {printable(origin.file)}:{origin.record}{text}"
        else:
            yield from _documents_of_row(part, reader, number, tokenizer)
    if limit < len(everyone):
        yield f"({len(everyone) - limit} more rows; --rows shows more)"


def _documents_of_row(part: Any, reader: Any, row: int, tokenizer: Tokenizer | None) -> Iterator[str]:
    offsets = reader.offsets(row)
    offsets = offsets[offsets >= 0]
    documents = reader.stream.documents(offsets)
    edges = np.flatnonzero(np.diff(documents)) + 1
    for place, piece in zip([0, *edges.tolist()], np.split(offsets, edges), strict=True):
        document = documents[place]
        origin = part.origin("train", document)
        first = piece[0] - reader.stream.document_starts[document]
        before = min(first, LONGEST_CONTEXT)
        tokens = np.empty(before + len(piece), np.int64)
        reader.stream.read(piece[0] - before, tokens)
        yield (
            f"  {place:>6}  {len(piece):>6} tokens from {first:,} of document {document:,}"
            f"  {printable(origin.file)}:{origin.record}{_decoded(tokenizer, tokens[before:], tokens[:before])}"
        )


def _decoded(tokenizer: Tokenizer | None, tokens: np.ndarray, context: Sequence[int] | np.ndarray = ()) -> str:
    if tokenizer is None:
        return ""
    shown = repr(decode_after(tokenizer, context, tokens))
    return f"  {shown if len(shown) <= _WIDTH else f'{shown[: _WIDTH - 2]}…{shown[-1]}'}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    align = [">" if all(map(_is_number, column[1:])) else "<" for column in columns]
    return ["  ".join(f"{cell:{a}{w}}" for cell, a, w in zip(row, align, widths, strict=True)).rstrip() for row in rows]


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").isdigit()
