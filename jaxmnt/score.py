"""python -m jaxmnt.score --run RUN[@STEP] --input FILE: computes log-likelihoods of texts with a checkpoint of a run.

FILE has JSON lines with "text", or with "context" and "continuation"; then only the continuation is scored, with the
blanks before it. Each becomes a line with "log_likelihood" (in nats), the number of scored "tokens", "bits_per_byte" of
their text, and "greedy" (true if each token was the likeliest). A text longer than the model's window is scored in
pieces, each token once. A line that cannot be scored becomes a line with "error", and the exit code is 2 at the end.
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
from jaxmnt.trained_model import Refused, add_arguments, checked_size, exit_code_of, find_model, json_lines, load_for

if TYPE_CHECKING:
    from jaxmnt.trained_model import TrainedModel, Vocabulary


@dataclass(frozen=True)
class ScoreRequest:
    """Token ids of a text. Those from `begin` on are scored; the first one never is."""

    ids: list[int]
    begin: int


@dataclass(frozen=True)
class Score:
    log_likelihood: float
    tokens: int
    greedy: bool


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    checked_size(options, "batch")

    with working("starting") as work:
        named = find_model(options.run, options.tokenizer)
        lines = json_lines(options.input, lambda where, record: (record, request_of(named.vocabulary, record, where)))
        loaded = load_for(named, lines, options.overrides, work)
        if loaded is None:
            return ExitCode.FINISHED
        model, lines = loaded
        refused = 0
        while some := list(itertools.islice(lines, 16 * options.batch)):
            work.does(f"scoring {counted(len(some), 'line', 'lines')}")
            requests = [line[1] for line in some if not isinstance(line, Refused)]
            line_scores = iter(scores(model, requests, options.batch))
            work.does("")
            for line in some:
                refused += isinstance(line, Refused)
                answer = line.to_json() if isinstance(line, Refused) else line[0] | _shown(line[0], next(line_scores))
                print(json_text(answer, ensure_ascii=False), flush=True)
    return exit_code_of(refused)


def request_of(vocabulary: "Vocabulary", record: dict[str, Any], where: str) -> ScoreRequest:
    """Returns the request of a line. Raises `ConfigError` if the line has no text to score."""
    context, continuation = _parts(record)
    if not isinstance(context, str) or not isinstance(continuation, str):
        raise ConfigError(f'{where}: it must have "text", or "context" and "continuation"')
    return continuation_of(vocabulary, context, continuation, where)


def _shown(record: dict[str, Any], score: Score) -> dict[str, Any]:
    """Returns the fields that are added to a line."""
    text = _scored_text(*_parts(record))
    bits = -score.log_likelihood / math.log(2)
    return vars(score) | {"bits_per_byte": bits / len(text.encode(errors="replace"))}


def _parts(record: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the context of a line, empty for a text without one, and the text to score after it."""
    text = record.get("text")
    return ("", text) if isinstance(text, str) else (record.get("context"), record.get("continuation"))


def _scored_text(context: str, continuation: str) -> str:
    """Returns the text that is scored, with the blanks before it: tokenizers join blanks with the following word."""
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
    """Returns the tokens of a context and its continuation, of which the continuation is scored.

    With `markup`, names of special tokens are encoded as these tokens; `begins` adds the beginning of a text, which the
    context does not contain then. Both are encoded as one text. If the tokenizer joins them in a token, they are
    encoded separately, so that the whole continuation is scored. The harness (`as_harness`) scores only the tokens
    after the joined one; then they are encoded separately only if no token follows it.
    """
    if not continuation:
        raise ConfigError(f"{where}: the text to score is empty; give some text")
    before = vocabulary.encode(context.rstrip(), markup=markup, where=where)
    whole = vocabulary.encode(context + continuation, markup=markup, where=where)
    if len(whole) <= len(before) or (whole[: len(before)] != before and not as_harness):
        rest = _scored_text(context, continuation)
        whole = before + vocabulary.encode(rest, markup=markup, begins=not before, where=where)
    if len(whole) == len(before):
        raise ConfigError(f"{where}: the tokenizer makes no token of the text to score; give other text")
    start = vocabulary.with_start([]) if not before else vocabulary.start if begins else []
    ids, begin = start + whole, len(start) + len(before)
    if len(ids) < 2:
        raise ConfigError(
            f"{where}: the text is one token, and no token can stand before it, so it has no score; give a context"
        )
    return ScoreRequest(ids, max(1, begin))


def scores(model: "TrainedModel", requests: Sequence[ScoreRequest], batch: int) -> list[Score]:
    """Returns the score of each request, in their order. Rows of similar length are computed together."""
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
        some = pieces[start : start + rows]
        width = rounded_length(max(len(piece.ids) - 1 for _, piece in some))
        ids = np.zeros((rows, width + 1), np.int32)
        for row, (_, piece) in zip(ids, some, strict=False):
            row[: len(piece.ids)] = piece.ids
        put = lambda array: jax.device_put(np.ascontiguousarray(array), sharding)
        row_scores = jax.device_get(model.row_scores(put(ids[:, :-1]), put(ids[:, 1:])))
        for (index, piece), log_p, best in zip(some, row_scores.log_p_BL, row_scores.likeliest_BL, strict=False):
            scored = slice(piece.begin - 1, len(piece.ids) - 1)
            total = totals[index]
            totals[index] = Score(
                total.log_likelihood + float(np.sum(log_p[scored], dtype=np.float64)),
                total.tokens + scored.stop - scored.start,
                total.greedy and bool(best[scored].all()),
            )
    return totals


def windows(request: ScoreRequest, window: int) -> Iterator[ScoreRequest]:
    """Yields pieces of at most `window` inputs that score each token of the request once. All but the first piece have
    half of the window as context."""
    begin, end = request.begin, len(request.ids)
    while begin < end:
        if end - begin <= window:  # the last piece, with as much context as fits
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
