"""python -m jaxmnt.lm_eval --run RUN[@STEP] --tasks NAME,…: tasks of EleutherAI's harness on a checkpoint.

Needs the extra lm_eval. Tasks of your own are YAML files in --include FOLDER. The results are printed as a table, or as
JSON. With --chat, conversations are written by the chat template of the model.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmnt.commands import HERE, Parser, run_command
from jaxmnt.errors import ConfigError, ExitCode, how_to_install, printable
from jaxmnt.generate import Request, complete
from jaxmnt.score import ScoreRequest, continuation_of, scores
from jaxmnt.strict_json import json_text
from jaxmnt.trained_model import add_arguments, find_model, size_of

if TYPE_CHECKING:
    from jaxmnt.trained_model import Named, TrainedModel
    from jaxmnt.training.inference import Sampling

_WHERE = "a request of the harness"
_TOKENS = 256
"""Of an answer, where a task does not say."""


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    size_of(options, "batch")
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(f"this needs the harness; {how_to_install('lm_eval')}") from error

    manager = TaskManager(include_path=None if options.include is None else str(options.include))
    names = options.tasks.split(",")
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise ConfigError(f"--tasks: {printable(unknown[0])} is not known; name its folder with --include")
    named = find_model(options.run, options.tokenizer)
    called = adapter(named, named.load(options.overrides), options.batch, chat=options.chat)
    results = lm_eval.simple_evaluate(
        model=called, tasks=names, task_manager=manager, num_fewshot=options.shots,
        limit=options.limit, apply_chat_template=options.chat, bootstrap_iters=options.bootstrap, verbosity="ERROR",
    )  # fmt: skip
    if options.json:
        print(json_text({"results": results["results"], "versions": results["versions"]}, sort_keys=True))
    else:
        for line in _table(results["results"]):
            print(line)
    return ExitCode.FINISHED


def _table(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A line for each number. The harness' own table starts processes, beside JAX's threads."""
    width = max(map(len, results))
    for task, found in sorted(results.items()):
        for name, value in sorted(found.items()):
            metric, _, how = name.partition(",")
            if not isinstance(value, float | int) or metric.endswith("_stderr") or not how:
                continue
            error = found.get(f"{metric}_stderr,{how}")
            spread = f" ± {error:.4f}" if isinstance(error, float) else ""
            yield printable(
                f"{task:<{width}}  {metric:<16} {value:.4f}{spread}  ({found.get('sample_len', '?')} documents)"
            )


def adapter(named: "Named", model: "TrainedModel", batch: int, *, chat: bool = False) -> Any:
    """The model as the harness calls one. `chat` says that it writes conversations by the chat template, which begins
    them, too."""
    from lm_eval.api.model import LM
    from lm_eval.utils import get_rolling_token_windows

    vocabulary = model.vocabulary
    if not vocabulary.begun([]):
        raise ConfigError("--run: nothing begins or ends a text of this run's data, which the harness needs")

    class Adapter(LM):
        """Requests are `Instance`s, whose `args` are those of the method's name in the harness. As there, names of
        special tokens stand for these."""

        def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            """The continuation of each, and whether each of its tokens was the likeliest."""
            wanted = []
            for request in requests:
                context, continuation = request.args
                wanted.append(
                    continuation_of(
                        vocabulary, context, continuation, _WHERE, markup=True, begins=not chat, as_harness=True
                    )
                )
            return [(found.log_likelihood, found.greedy) for found in scores(model, wanted, batch)]

        def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
            """All of a text, in the windows that the harness cuts."""
            pieces: list[tuple[int, ScoreRequest]] = []
            for index, request in enumerate(requests):
                pairs = get_rolling_token_windows(
                    token_list=vocabulary.encode(request.args[0], markup=True, where=_WHERE),
                    prefix_token=vocabulary.begun([])[-1], max_seq_len=model.window, context_len=1,
                )  # fmt: skip
                pieces += [(index, ScoreRequest([*given, new[-1]], len(given) + 1 - len(new))) for given, new in pairs]
            totals = [0.0] * len(requests)
            told = scores(model, [piece for index, piece in pieces], batch)
            for (index, _piece), score in zip(pieces, told, strict=True):
                totals[index] += score.log_likelihood
            return totals

        def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
            """The continuation of each, as its task asks for it."""
            asked = [(number, *_asked(model, *one.args, chat=chat)) for number, one in enumerate(requests)]
            for sampling, some in _alike(asked, batch):
                complete(model, some, sampling, lambda: None)
            return [request.text for _, request, _ in asked]

        @property
        def tokenizer_name(self) -> str:
            return str(vocabulary.tokenizer.description["name"])

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return named.rendered(chat_history, _WHERE, add_generation_prompt)

    return Adapter()


def _asked(model: "TrainedModel", context: str, settings: dict[str, Any], *, chat: bool) -> "tuple[Request, Sampling]":
    """A request, and how its tokens are chosen."""
    from jaxmnt.training.inference import Sampling

    until, most = settings.get("until") or (), int(settings.get("max_gen_toks", _TOKENS))
    if most >= model.window:
        raise ConfigError(
            f"--tasks: a task asks for {most} tokens, and the model's window of {model.window} must hold the question, "
            "too; choose another task"
        )
    ids = model.vocabulary.encode(context, markup=True, where=_WHERE)
    ids = ids if chat else model.vocabulary.begun(ids)
    ids = ids[-(model.window - most) :]  # the newest part of a context that is too long, as the harness does
    temperature = float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0
    sampling = Sampling(temperature, int(settings.get("top_k", 0)), float(settings.get("top_p", 1.0)))
    return Request(ids, "", {}, most, (until,) if isinstance(until, str) else tuple(until)), sampling


def _alike(
    asked: "list[tuple[int, Request, Sampling]]", batch: int
) -> "Iterator[tuple[Sampling, list[tuple[int, Request]]]]":
    """Requests that are sampled alike, of like length, so many at a time, with their numbers."""
    groups: dict[Any, list[tuple[int, Request]]] = {}
    for number, request, sampling in asked:
        groups.setdefault(sampling, []).append((number, request))
    for sampling, same in groups.items():
        same.sort(key=lambda one: len(one[1].ids))
        for start in range(0, len(same), batch):
            yield sampling, same[start : start + batch]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.lm_eval", description=__doc__, codes=HERE)
    add_arguments(parser)
    parser.add_argument("--tasks", required=True, metavar="NAME,…", help="tasks or groups of the harness")
    parser.add_argument("--include", type=Path, metavar="FOLDER", help="folder with tasks of your own")
    parser.add_argument("--shots", type=int, metavar="N", help="examples before each question (default: the task's)")
    parser.add_argument("--limit", type=float, metavar="N", help="only so many documents, or this share of them")
    parser.add_argument("--chat", action="store_true", help="write conversations by the model's chat template")
    parser.add_argument("--bootstrap", type=int, default=1000, metavar="N", help="samples for errors (1000)")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    run_command(main)
