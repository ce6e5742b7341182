"""python -m jaxmnt.score --run RUN[@STEP] --input FILE: computes log-likelihoods of texts with a checkpoint of a run.

FILE has JSON lines with "text", or with "context" and "continuation". In the latter case only the continuation is
scored, together with the spaces before it. Each becomes an output line with "log_likelihood" (in nats), the number of
scored "tokens", "bits_per_byte" of their text, and "greedy" (true if each token was the likeliest). A text that is
longer than the model's window is scored in pieces, but each token only once. A line that cannot be scored becomes a
line with "error", and the exit code at the end is 2.
"""

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxmnt.commands import LOCAL_EXIT_CODES, Parser, path_argument, run_command
from jaxmnt.errors import ConfigError, ExitCode, counted
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.progress import working
from jaxmnt.trained_model import (
    RefusedLine,
    adapter_options,
    add_arguments,
    check_size,
    exit_code_of,
    find_model,
    json_lines,
    load_for_lines,
)

if TYPE_CHECKING:
    from jaxmnt.data.vocabulary import Vocabulary
    from jaxmnt.trained_model import TrainedModel


@dataclass(frozen=True)
class ScoreRequest:
    """The token ids of a text, and which of them are scored."""

    ids: list[int]
    begin: int
    """Index of the first id that is scored, at least 1, because nothing predicts the first token."""


@dataclass(frozen=True)
class Score:
    """The score of a text. The names of its fields are those of the output."""

    log_likelihood: float
    tokens: int
    greedy: bool


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    check_size(options, "batch")

    with working("starting") as work:
        selected = find_model(options.run, options.tokenizer, adapter_options(options))
        parse = lambda where, record: (record, request_of(selected.vocabulary, record, where))
        lines = json_lines(options.input, parse)
        loaded = load_for_lines(selected, lines, options.overrides, work)
        if loaded is None:
            return ExitCode.FINISHED
        model, lines = loaded
        refused = 0
        while next_lines := list(itertools.islice(lines, 16 * options.batch)):
            work.does(f"scoring {counted(len(next_lines), 'line', 'lines')}")
            requests = [line[1] for line in next_lines if not isinstance(line, RefusedLine)]
            line_scores = iter(scores(model, requests, options.batch))
            work.does("")
            for line in next_lines:
                if isinstance(line, RefusedLine):
                    refused += 1
                    answer = line.to_json()
                else:
                    record, _request = line
                    answer = record | _score_fields(record, next(line_scores))
                print(json_text(answer, ensure_ascii=False), flush=True)
    return exit_code_of(refused)


def request_of(vocabulary: "Vocabulary", record: dict[str, Any], where: str) -> ScoreRequest:
    """Returns the request of a line. Raises `ConfigError` if the line has no text to score."""
    context, continuation = _parts(record)
    if not isinstance(context, str) or not isinstance(continuation, str):
        raise ConfigError(f'{where}: it must have "text", or "context" and "continuation"')
    return continuation_of(vocabulary, context, continuation, where)


def _score_fields(record: dict[str, Any], score: Score) -> dict[str, Any]:
    """Returns the fields that are added to an input line to make its output line."""
    text = _scored_text(*_parts(record))
    bits = -score.log_likelihood / math.log(2)
    return vars(score) | {"bits_per_byte": bits / len(text.encode(errors="replace"))}


def _parts(record: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the context in a line, which is empty for a "text", and the text to score after it."""
    text = record.get("text")
    return ("", text) if isinstance(text, str) else (record.get("context"), record.get("continuation"))


def _scored_text(context: str, continuation: str) -> str:
    """Returns the text that is scored. It includes the spaces before it, because tokenizers join them with the next
    word."""
    return (context + continuation)[len(context.rstrip()) :]


def continuation_of(
    vocabulary: "Vocabulary",
    context: str,
    continuation: str,
    where: str,
    *,
    markup: bool = False,
    begins: bool = True,
    as_harness: bool = False,
) -> ScoreRequest:
    """Returns a request with the tokens of a context and its continuation, of which the continuation is scored.

    With `markup`, the names of special tokens are encoded as the tokens themselves. `begins` adds the ids that begin a
    text, unless the context already contains them. The context and the continuation are encoded as one text. If the
    tokenizer joins parts of both in one token, they are encoded separately, so that the whole continuation is scored.
    The harness (`as_harness`) scores only the tokens after the joined one, so for it they are encoded separately only
    if no token follows that one.
    """
    if not continuation:
        raise ConfigError(f"{where}: the text to score is empty; give some text")
    context_ids = vocabulary.encode(context.rstrip(), markup=markup, where=where)
    text_ids = vocabulary.encode(context + continuation, markup=markup, where=where)
    is_joined = text_ids[: len(context_ids)] != context_ids
    if len(text_ids) <= len(context_ids) or (is_joined and not as_harness):
        rest = _scored_text(context, continuation)
        text_ids = context_ids + vocabulary.encode(rest, markup=markup, begins=not context_ids, where=where)
    if len(text_ids) == len(context_ids):
        raise ConfigError(f"{where}: the tokenizer makes no token of the text to score; give a different text")
    start = vocabulary.start_ids if begins else []
    if not context_ids:
        start = vocabulary.with_start([])
    ids, begin = start + text_ids, len(start) + len(context_ids)
    if len(ids) < 2:
        raise ConfigError(
            f"{where}: the text is one token, and no token can precede it, so it has no score; give a context"
        )
    return ScoreRequest(ids, max(1, begin))


def scores(model: "TrainedModel", requests: Sequence[ScoreRequest], batch: int) -> list[Score]:
    """Returns the score of each request, in the order of the requests. Rows of similar length are computed together."""
    import jax
    import numpy as np

    from jaxmnt.training.inference import rounded_length

    # Long texts are cut into pieces, and pieces of similar length share a batch.
    pieces = [(index, piece) for index, request in enumerate(requests) for piece in windows(request, model.window)]
    pieces.sort(key=lambda piece: len(piece[1].ids))
    totals = [Score(0.0, 0, True) for _ in requests]

    # The number of rows is rounded up to a multiple of the devices that share them.
    shards = model.spec.placement.batch_shards
    rows = -(-batch // shards) * shards
    sharding = model.spec.placement.sharding(("batch", None))
    for start in range(0, len(pieces), rows):
        batch_pieces = pieces[start : start + rows]
        width = rounded_length(max(len(piece.ids) - 1 for _, piece in batch_pieces))
        width += -width % model.spec.placement.row_divisor
        ids = np.zeros((rows, width + 1), np.int32)
        for row, (_, piece) in zip(ids, batch_pieces, strict=False):
            row[: len(piece.ids)] = piece.ids
        put = lambda array: jax.device_put(np.ascontiguousarray(array), sharding)
        row_scores = jax.device_get(model.row_scores(put(ids[:, :-1]), put(ids[:, 1:])))
        row_results = zip(batch_pieces, row_scores.log_p_BL, row_scores.is_likeliest_BL, strict=False)
        for (index, piece), log_p, likeliest in row_results:
            scored = slice(piece.begin - 1, len(piece.ids) - 1)
            total = totals[index]
            totals[index] = Score(
                total.log_likelihood + float(np.sum(log_p[scored], dtype=np.float64)),
                total.tokens + scored.stop - scored.start,
                total.greedy and bool(likeliest[scored].all()),
            )
    return totals


def windows(request: ScoreRequest, window: int) -> Iterator[ScoreRequest]:
    """Yields pieces of at most `window` inputs that together score each token of the request once. In all pieces but
    the first, half of the window is context."""
    begin, end = request.begin, len(request.ids)
    while begin < end:
        if end - begin <= window:  # the last piece has as much context as fits
            first = max(0, end - window - 1)
        else:
            first = max(0, begin - 1 - (window // 2 if begin > request.begin else window - 1))
        last = min(end, first + window + 1)
        yield ScoreRequest(request.ids[first:last], begin - first)
        begin = last


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.score", description=__doc__, codes=LOCAL_EXIT_CODES)
    add_arguments(parser)
    parser.add_argument(
        "--input", type=path_argument, default="-", metavar="FILE", help="JSON lines (default: standard input)"
    )
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    run_command(main)
