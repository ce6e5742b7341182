"""python -m jaxmnt.score --run RUN[@STEP] --input FILE: log-likelihoods of texts by a checkpoint of a run.

FILE has JSON lines with "text", or with "context" and "continuation", of which the continuation alone is scored, with
the blanks before it. Each becomes a line with "log_likelihood" (in nats), "tokens" that were scored, "bits_per_byte" of
their text, and whether each token was the likeliest ("greedy"). A text longer than the model's window is scored in
pieces, each token once. A line that cannot be scored becomes a line with "error", and the exit code is 2 at the end.
"""

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxmnt.commands import HERE, Parser, path_argument, run_command
from jaxmnt.errors import ConfigError, ExitCode, counted
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.progress import working
from jaxmnt.trained_model import Refused, add_arguments, exit_code_of, find_model, json_lines, load_for, size_of

if TYPE_CHECKING:
    from jaxmnt.trained_model import TrainedModel, Vocabulary


@dataclass(frozen=True)
class ScoreRequest:
    """Token ids, of which those from `begin` on are scored; the first one never is."""

    ids: list[int]
    begin: int


@dataclass(frozen=True)
class Score:
    log_likelihood: float
    tokens: int
    greedy: bool


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    size_of(options, "batch")

    with working("starting") as work:
        named = find_model(options.run, options.tokenizer)
        lines = json_lines(options.input, lambda where, record: (record, request_of(named.vocabulary, record, where)))
        loaded = load_for(named, lines, options.overrides, work)
        if loaded is None:
            return ExitCode.FINISHED
        (model, lines), refused = loaded, 0
        while some := list(itertools.islice(lines, 16 * options.batch)):
            work.does(f"scoring {counted(len(some), 'line', 'lines')}")
            wanted = [line[1] for line in some if not isinstance(line, Refused)]
            found = iter(scores(model, wanted, options.batch))
            work.does("")
            for line in some:
                refused += isinstance(line, Refused)
                answer = line.to_json() if isinstance(line, Refused) else line[0] | _shown(line[0], next(found))
                print(json_text(answer, ensure_ascii=False), flush=True)
    return exit_code_of(refused)


def request_of(vocabulary: "Vocabulary", record: dict[str, Any], where: str) -> ScoreRequest:
    """What is to be scored of a line. Raises `ConfigError` for one that says nothing."""
    context, continuation = _parts(record)
    if not isinstance(context, str) or not isinstance(continuation, str):
        raise ConfigError(f'{where}: it must have "text", or "context" and "continuation"')
    return continuation_of(vocabulary, context, continuation, where)


def _shown(record: dict[str, Any], score: Score) -> dict[str, Any]:
    """Returns what is added to a line."""
    text = _scored_text(*_parts(record))
    bits = -score.log_likelihood / math.log(2)
    return vars(score) | {"bits_per_byte": bits / len(text.encode(errors="replace"))}


def _parts(record: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the context of a line, empty for a text without one, and the text to score after it."""
    text = record.get("text")
    return ("", text) if isinstance(text, str) else (record.get("context"), record.get("continuation"))


def _scored_text(context: str, continuation: str) -> str:
    """Returns the text that is scored: blanks between the two belong to the word after them, as tokens have it."""
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
    """Returns the tokens of a context and its continuation, which is to be scored.

    `markup` says that names of special tokens stand for these, and `begins` that nothing in the context begins a text
    yet. Both are encoded as one text. If the tokenizer joins them in a token, they are encoded apart, so that the whole
    continuation is scored. The harness (`as_harness`) scores only what follows the joined token; then they are encoded
    apart if nothing follows it.
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
    start = vocabulary.begun([]) if not before else vocabulary.start if begins else []
    ids, begin = start + whole, len(start) + len(before)
    if len(ids) < 2:
        raise ConfigError(
            f"{where}: the text is one token, and no token can stand before it, so it has no score; give a context"
        )
    return ScoreRequest(ids, max(1, begin))


def scores(model: "TrainedModel", wanted: Sequence[ScoreRequest], batch: int) -> list[Score]:
    """The scores in the order in which they are wanted, so many rows at a time, of like length."""
    import jax
    import numpy as np

    from jaxmnt.training.inference import rounded_length

    pieces = [(index, piece) for index, one in enumerate(wanted) for piece in windows(one, model.window)]
    pieces.sort(key=lambda piece: len(piece[1].ids))
    totals = [Score(0.0, 0, True) for _ in wanted]
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
        found = jax.device_get(model.row_scores(put(ids[:, :-1]), put(ids[:, 1:])))
        for (index, piece), log_p, best in zip(some, found.log_p_BL, found.likeliest_BL, strict=False):
            here, old = slice(piece.begin - 1, len(piece.ids) - 1), totals[index]
            log_likelihood = old.log_likelihood + float(np.sum(log_p[here], dtype=np.float64))
            totals[index] = Score(
                log_likelihood, old.tokens + here.stop - here.start, old.greedy and bool(best[here].all())
            )
    return totals


def windows(wanted: ScoreRequest, window: int) -> Iterator[ScoreRequest]:
    """Pieces that fit the window, `window` inputs each, so that each wanted token is scored once: all but the first
    have half of the window before them."""
    begin, end = wanted.begin, len(wanted.ids)
    while begin < end:
        if end - begin <= window:  # with as much before it as there is room for
            first = max(0, end - window - 1)
        else:
            first = max(0, begin - 1 - (window // 2 if begin > wanted.begin else window - 1))
        last = min(end, first + window + 1)
        yield ScoreRequest(wanted.ids[first:last], begin - first)
        begin = last


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.score", description=__doc__, codes=HERE)
    add_arguments(parser)
    parser.add_argument(
        "--input", type=path_argument, default="-", metavar="FILE", help="JSON lines (default: standard input)"
    )
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    run_command(main)
