"""python -m jaxmnt.lm_eval --run RUN[@STEP] --tasks NAME,…: tasks of EleutherAI's harness on a checkpoint.

Needs the extra lm_eval. Tasks of your own are YAML files in --include FOLDER. The results are printed as a table, or as
JSON. With --chat, conversations are written by the chat template of the model.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmnt.commands import HERE, Parser, run_command
from jaxmnt.errors import ConfigError, ExitCode, printable
from jaxmnt.generate import Request
from jaxmnt.score import Wanted, scores, wanted_of
from jaxmnt.trained_model import add_arguments, load_model, read_vocabulary, size_of

if TYPE_CHECKING:
    from jaxmnt.trained_model import TrainedModel

_TOKENS = 256
"""Of an answer, where a task does not say."""


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    size_of(options, "batch")
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError("this needs the harness; install it with: pip install 'jaxmnt[lm_eval]'") from error

    from jaxmnt.checkpoint.refs import find, roots_of
    from jaxmnt.huggingface import companions

    manager = TaskManager(include_path=None if options.include is None else str(options.include))
    names = options.tasks.split(",")
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise ConfigError(f"--tasks: {printable(unknown[0])} is not known; name its folder with --include")
    checkpoint = find(options.run, "--run")
    files = companions.kept(roots_of(options.run, checkpoint))
    vocabulary = read_vocabulary(options.run, options.tokenizer, checkpoint, files)
    model = load_model(checkpoint, vocabulary, options.overrides, options.batch)
    results = lm_eval.simple_evaluate(
        model=adapter(model, options.batch, files), tasks=names, task_manager=manager, num_fewshot=options.shots,
        limit=options.limit, apply_chat_template=options.chat, bootstrap_iters=options.bootstrap, verbosity="ERROR",
    )  # fmt: skip
    if options.json:
        print(json.dumps({"results": results["results"], "versions": results["versions"]}, sort_keys=True))
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


def adapter(model: "TrainedModel", batch: int, files: dict[str, bytes]) -> Any:
    """The model as the harness calls one. `files` are what came with it, for its chat template."""
    from lm_eval.api.model import LM
    from lm_eval.utils import get_rolling_token_windows

    class Adapter(LM):
        """Requests are `Instance`s, whose `args` are those of the method's name in the harness."""

        def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            """The continuation of each, and whether each of its tokens was the likeliest."""
            wanted = [
                wanted_of(model.vocabulary, dict(zip(("context", "continuation"), one.args, strict=True)), "a request")
                for one in requests
            ]
            return [(found.log_likelihood, found.greedy) for found in scores(model, wanted, batch)]

        def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
            """All of a text, in the windows that the harness cuts."""
            pieces: list[tuple[int, Wanted]] = []
            start = model.vocabulary.start[-1:] or [0]
            for index, request in enumerate(requests):
                ids = model.vocabulary.encode(request.args[0], where="a request")
                pairs = get_rolling_token_windows(
                    token_list=ids, prefix_token=start[0], max_seq_len=model.window, context_len=1
                )
                pieces += [(index, Wanted([*given, new[-1]], len(given) + 1 - len(new))) for given, new in pairs]
            totals = [0.0] * len(requests)
            told = scores(model, [piece for index, piece in pieces], batch)
            for (index, _piece), score in zip(pieces, told, strict=True):
                totals[index] += score.log_likelihood
            return totals

        def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
            """The continuation of each, as its task asks for it."""
            asked = [_asked(model, *one.args) for one in requests]
            for some in _alike(asked, batch):
                _complete(model, some)
            return [request.text for request, *_ in asked]

        @property
        def tokenizer_name(self) -> str:
            return str(model.vocabulary.tokenizer.description["name"])

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            from jaxmnt.data.chat_template import chat_template, render, special_tokens

            template = chat_template(files)
            if template is None:
                raise ConfigError("--chat: the run has no chat template; leave it out")
            return render(template, chat_history, special_tokens(files), add_generation_prompt)

    return Adapter()


Asked = tuple[Request, tuple[str, ...], Any]
"""A request, its stop texts, and how its tokens are chosen."""


def _asked(model: "TrainedModel", context: str, settings: dict[str, Any]) -> Asked:
    from jaxmnt.training.inference import Sampling

    until = settings.get("until") or []
    most = min(int(settings.get("max_gen_toks", _TOKENS)), model.window - 1)
    ids = (model.vocabulary.start + model.vocabulary.encode(context, markup=True, where="a request")) or [0]
    ids = ids[-(model.window - most) :]  # the newest part of a context that is too long
    temperature = float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0
    sampling = Sampling(temperature, int(settings.get("top_k", 0)), float(settings.get("top_p", 1.0)))
    stops = (until,) if isinstance(until, str) else tuple(until)
    return Request(ids, "", {}, most), stops, sampling


def _alike(asked: list[Asked], batch: int) -> Iterator[list[Asked]]:
    """Those that are sampled alike, of like length, so many at a time."""
    groups: dict[Any, list[Asked]] = {}
    for one in asked:
        groups.setdefault(one[2], []).append(one)
    for same in groups.values():
        same.sort(key=lambda one: len(one[0].ids))
        for start in range(0, len(same), batch):
            yield same[start : start + batch]


def _complete(model: "TrainedModel", some: list[Asked]) -> None:
    import numpy as np

    from jaxmnt.training.inference import Generator

    generator = Generator(model.spec, model.params, model.buffers, some[0][2])
    prompts = [np.array(request.ids, np.int32) for request, *_ in some]
    for tokens in generator.generate(prompts, max(request.room for request, *_ in some)):
        for (request, stops, _), token in zip(some, tokens, strict=True):
            request.take(int(token), model.vocabulary, stops)
        if all(request.finish for request, *_ in some):
            return


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
