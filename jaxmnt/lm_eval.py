"""python -m jaxmnt.lm_eval --run RUN[@STEP] --tasks NAME,…: runs tasks of EleutherAI's harness on a checkpoint.

Needs the extra lm_eval. Tasks of your own are YAML files in --include FOLDER. The results are printed as a table, or as
JSON. With --chat, conversations are formatted with the model's chat template.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmnt.commands import LOCAL_EXIT_CODES, Parser, run_command
from jaxmnt.errors import ConfigError, ExitCode, how_to_install, printable
from jaxmnt.generate import Request, complete
from jaxmnt.score import ScoreRequest, continuation_of, scores
from jaxmnt.strict_json import json_text
from jaxmnt.trained_model import adapter_options, add_arguments, check_size, find_model

if TYPE_CHECKING:
    from jaxmnt.trained_model import SelectedModel, TrainedModel
    from jaxmnt.training.inference import Sampling

_WHERE = "a request of the harness"
_DEFAULT_TOKENS = 256
"""Maximum number of tokens in an answer if a task does not set one."""


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    check_size(options, "batch")
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(f"this needs the harness; {how_to_install('lm_eval')}") from error

    class Tasks(TaskManager):
        """The harness's tasks. Those that the model's mesh cannot run are refused when they are loaded, which is before
        the harness runs the first of them."""

        def load(self, task_list: Any) -> Any:
            from jaxmnt.training.inference import check_generation

            loaded = super().load(task_list)
            if any(task.get_config("output_type") == "generate_until" for task in loaded["tasks"].values()):
                check_generation(model.spec.placement.num_shards("length"))
            return loaded

    manager = Tasks(include_path=None if options.include is None else str(options.include))
    names = options.tasks.split(",")
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise ConfigError(f"--tasks: {printable(unknown[0])} is not known; name its folder with --include")
    selected = find_model(options.run, options.tokenizer, adapter_options(options))
    model = selected.load(options.overrides)
    results = lm_eval.simple_evaluate(
        model=adapter(selected, model, options.batch, chat=options.chat), tasks=names, task_manager=manager,
        num_fewshot=options.shots, limit=options.limit, apply_chat_template=options.chat,
        bootstrap_iters=options.bootstrap, verbosity="ERROR",
    )  # fmt: skip
    if options.json:
        print(json_text({"results": results["results"], "versions": results["versions"]}, sort_keys=True))
    else:
        for line in _table(results["results"]):
            print(line)
    return ExitCode.FINISHED


def _table(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yields a line for each metric. The harness's own table would fork processes, which is unsafe with
    JAX's threads."""
    width = max(map(len, results))
    for task, metrics in sorted(results.items()):
        for name, value in sorted(metrics.items()):
            # A name is METRIC,FILTER.
            metric, _, filter_name = name.partition(",")
            if not isinstance(value, float | int) or metric.endswith("_stderr") or not filter_name:
                continue
            error = metrics.get(f"{metric}_stderr,{filter_name}")
            spread = f" ± {error:.4f}" if isinstance(error, float) else ""
            yield printable(
                f"{task:<{width}}  {metric:<16} {value:.4f}{spread}  ({metrics.get('sample_len', '?')} documents)"
            )


def adapter(selected: "SelectedModel", model: "TrainedModel", batch: int, *, chat: bool = False) -> Any:
    """Returns the model as the harness's interface `LM`. With `chat`, the harness formats conversations with the chat
    template, whose text already contains the tokens that begin a text."""
    from lm_eval.api.model import LM
    from lm_eval.utils import get_rolling_token_windows

    vocabulary = model.vocabulary
    if not vocabulary.with_start([]):
        raise ConfigError("--run: the run's data has no token that begins or ends a text, which the harness needs")

    class Adapter(LM):
        """The model as the harness calls it. Requests are `Instance`s, with the `args` that the harness documents for
        each method. As in the harness, the names of special tokens are encoded as the tokens themselves."""

        def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            """Returns the log-likelihood of each continuation, and whether each of its tokens was the likeliest."""
            score_requests = []
            for request in requests:
                context, continuation = request.args
                score_requests.append(
                    continuation_of(
                        vocabulary, context, continuation, _WHERE, markup=True, begins=not chat, as_harness=True
                    )
                )
            return [(score.log_likelihood, score.greedy) for score in scores(model, score_requests, batch)]

        def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
            """Returns the log-likelihood of each complete text, computed in the windows into which the harness cuts
            it."""
            pieces: list[tuple[int, ScoreRequest]] = []
            for index, request in enumerate(requests):
                pairs = get_rolling_token_windows(
                    token_list=vocabulary.encode(request.args[0], markup=True, where=_WHERE),
                    prefix_token=vocabulary.with_start([])[-1], max_seq_len=model.window, context_len=1,
                )  # fmt: skip
                for context, new in pairs:
                    pieces.append((index, ScoreRequest([*context, new[-1]], len(context) + 1 - len(new))))
            totals = [0.0] * len(requests)
            piece_scores = scores(model, [piece for index, piece in pieces], batch)
            for (index, _piece), score in zip(pieces, piece_scores, strict=True):
                totals[index] += score.log_likelihood
            return totals

        def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
            """Returns a continuation of each context, generated with the settings of its task."""
            numbered = [
                (number, *_generation_request(model, *instance.args, chat=chat))
                for number, instance in enumerate(requests)
            ]
            for sampling, batch_requests in _batches_by_sampling(numbered, batch):
                complete(model, batch_requests, sampling, lambda: None)
            return [request.text for _, request, _ in numbered]

        @property
        def tokenizer_name(self) -> str:
            return str(vocabulary.tokenizer.description["name"])

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return selected.chat.render(chat_history, _WHERE, add_generation_prompt)

    return Adapter()


def _generation_request(
    model: "TrainedModel", context: str, settings: dict[str, Any], *, chat: bool
) -> "tuple[Request, Sampling]":
    """Returns the request for a context, and its sampling parameters."""
    from jaxmnt.training.inference import Sampling

    stops = settings.get("until") or ()
    max_tokens = int(settings.get("max_gen_toks", _DEFAULT_TOKENS))
    if max_tokens >= model.window:
        raise ConfigError(
            f"--tasks: a task asks for {max_tokens} tokens, and the model's window of {model.window} must hold the "
            "question, too; choose another task"
        )
    ids = model.vocabulary.encode(context, markup=True, where=_WHERE)
    ids = ids if chat else model.vocabulary.with_start(ids)
    ids = ids[-(model.window - max_tokens) :]  # like the harness, keeps the end of a context that is too long
    temperature = float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0
    sampling = Sampling(temperature, int(settings.get("top_k", 0)), float(settings.get("top_p", 1.0)))
    return Request(ids, "", {}, max_tokens, (stops,) if isinstance(stops, str) else tuple(stops)), sampling


def _batches_by_sampling(
    requests: "list[tuple[int, Request, Sampling]]", batch: int
) -> "Iterator[tuple[Sampling, list[tuple[int, Request]]]]":
    """Yields batches of numbered requests with equal sampling parameters and similar length."""
    groups: dict[Any, list[tuple[int, Request]]] = {}
    for number, request, sampling in requests:
        groups.setdefault(sampling, []).append((number, request))
    for sampling, group in groups.items():
        group.sort(key=lambda numbered: len(numbered[1].ids))
        for start in range(0, len(group), batch):
            yield sampling, group[start : start + batch]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.lm_eval", description=__doc__, codes=LOCAL_EXIT_CODES)
    add_arguments(parser)
    parser.add_argument("--tasks", required=True, metavar="NAME,…", help="tasks or groups of the harness to run")
    parser.add_argument("--include", type=Path, metavar="FOLDER", help="folder with tasks of your own")
    parser.add_argument("--shots", type=int, metavar="N", help="examples before each question (default: the task's)")
    parser.add_argument("--limit", type=float, metavar="N", help="use only N documents, or the fraction N of them")
    parser.add_argument("--chat", action="store_true", help="format conversations with the model's chat template")
    parser.add_argument(
        "--bootstrap", type=int, default=1000, metavar="N", help="bootstrap samples for standard errors (1000)"
    )
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    run_command(main)
