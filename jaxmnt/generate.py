"""python -m jaxmnt.generate --run RUN[@STEP] [--prompt TEXT]: continues a prompt with a checkpoint of a run.

RUN is a run directory, or the folder or gs:// address of checkpoint.dir; without STEP its newest whole checkpoint.
Neither the data nor the folder that the run was started in are needed.
"""

import argparse
import math
import sys
from typing import TYPE_CHECKING

from jaxmnt.commands import HERE, Parser, run_command
from jaxmnt.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from jaxmnt.checkpoint.commit import Committed
    from jaxmnt.config import Config
    from jaxmnt.data.run_tokenizer import RunTokenizer
    from jaxmnt.data.tokenizer import Tokenizer

_TOKENS = 200
_SEEDS = 2**31


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    wanted = _TOKENS if options.tokens is None else options.tokens
    if wanted < 1 or not 0 <= options.temperature < math.inf:
        raise ConfigError("--tokens takes a number from 1 up, --temperature one from 0 up")
    if not -_SEEDS <= options.seed < _SEEDS:
        raise ConfigError(f"--seed: {options.seed} is out of range; give a number below {_SEEDS}")

    from jaxmnt.checkpoint.refs import find
    from jaxmnt.config.load import parse_config

    checkpoint = find(options.run, "--run")
    config = parse_config(checkpoint.manifest.config, f"the config in {checkpoint.path}")
    tokenizer, vocab_size, end = _tokenizer(options, checkpoint, config)
    window = config.data.sequence_length
    prompt = _encoded(options.prompt, tokenizer, vocab_size, end)
    room = window - len(prompt)
    if room < 1:
        raise ConfigError(f"--prompt: {len(prompt)} tokens fill the model's window of {window}; shorten it")
    if options.tokens is not None and wanted > room:
        print(
            f"note    --tokens: {wanted} and the prompt's {len(prompt)} are more than the model's window of {window} "
            f"tokens; {room} are generated",
            file=sys.stderr,
        )

    import numpy as np

    from jaxmnt.checkpoint.restore import restore
    from jaxmnt.distributed.identity import Identity
    from jaxmnt.training.compile import inference_spec
    from jaxmnt.training.inference import sample
    from jaxmnt.training.state import abstract_state, model_state

    spec = inference_spec(config, vocab_size)
    state = restore(checkpoint, model_state(abstract_state(spec)), Identity()).state
    start = np.array(prompt, np.int32)
    tokens = sample(
        spec, state["params"], state.get("buffers", {}), start, min(wanted, room), options.temperature, options.seed
    )
    ended = np.flatnonzero(tokens == (-1 if end is None else end))
    text = tokenizer.decode(tokens[: ended[0]] if len(ended) else tokens)
    print(options.prompt + text)
    return ExitCode.FINISHED


def _tokenizer(
    options: argparse.Namespace, checkpoint: "Committed", config: "Config"
) -> "tuple[Tokenizer, int, int | None]":
    """What turns text into the run's tokens and back, how many ids the model knows, and the end of a document's."""
    from jaxmnt.data.manifest import NAMELESS
    from jaxmnt.data.tokenizer import HuggingFace, choose_tokenizer, load

    known = _known(options, checkpoint)
    if known is not None and known.name == "synthetic":
        raise ConfigError("--run: it was trained on random tokens (data.synthetic), which no text stands for")
    if known is not None and known.name != NAMELESS:
        tokenizer = known.open()
        if options.tokenizer is not None:
            given = choose_tokenizer(options.tokenizer, known.description.get("end_token"), for_text=False)
            if given.description != tokenizer.description:
                raise ConfigError(
                    f"--tokenizer: {options.tokenizer} is not the one that the run was trained with, which it keeps; "
                    "leave it out"
                )
        return tokenizer, known.vocab_size, known.end_of_document
    if options.tokenizer is None:
        raise ConfigError(
            "--tokenizer: the run was trained on token arrays whose tokenizer is not recorded; give bytes, or the "
            "path of the tokenizer.json that made them"
        )
    if known is None:
        return _named_for_unknown(options.tokenizer, config)
    named = load(options.tokenizer)
    if isinstance(named, HuggingFace) and named.vocab_size != known.vocab_size:
        print(
            f"note    --tokenizer: {options.tokenizer} has {named.vocab_size} ids, the run's tokens "
            f"{known.vocab_size}: it may not be theirs",
            file=sys.stderr,
        )
    return named, known.vocab_size, known.end_of_document


def _named_for_unknown(given: str, config: "Config") -> "tuple[Tokenizer, int, int | None]":
    """What the command line names, for a run that neither keeps a tokenizer nor has its data here."""
    from jaxmnt.data.tokenizer import load

    rows, named = config.model.vocab_size, load(given)
    assert rows is not None
    return named, min(rows, named.vocab_size), named.end_of_document


def _known(options: argparse.Namespace, checkpoint: "Committed") -> "RunTokenizer | None":
    """What the run keeps, or its data says; None if neither does and the command line names a tokenizer."""
    from jaxmnt.checkpoint.refs import tokenizer_of

    try:
        return tokenizer_of(options.run, checkpoint)
    except ConfigError as error:
        if options.tokenizer is not None:
            return None
        raise ConfigError(
            f"--tokenizer: not given, and the run does not tell: {error}; name bytes or a tokenizer.json"
        ) from error


def _encoded(prompt: str, tokenizer: "Tokenizer", vocab_size: int, end: int | None) -> list[int]:
    """The ids of the prompt, after the end of the document before."""
    text = prompt.encode("utf-8", errors="replace").decode()  # what a terminal hands over need not be text
    ids = [] if end is None else [end]
    ids += tokenizer.encode_batch([text])[0].tolist()
    if not ids:
        raise ConfigError(
            "--prompt: missing; this run's data has no end-of-document id that could start a sample: give some text"
        )
    if max(ids) >= vocab_size:
        raise ConfigError(
            f"--tokenizer: it makes id {max(ids)} of the prompt, and the run has ids below {vocab_size}; "
            "give the one that made its tokens"
        )
    return ids


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.generate", description=__doc__, codes=HERE)
    parser.add_argument("--run", required=True, metavar="RUN[@STEP]", help="run directory, as in run.dir")
    parser.add_argument("--prompt", default="", help="text to continue (default: the start of a document)")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="of a run on token arrays: bytes, or the tokenizer.json that made them"
    )
    parser.add_argument(
        "--tokens", type=int, metavar="N", help=f"at most so many new tokens ({_TOKENS}, or what the window holds)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.7, metavar="T", help="0 is the likeliest; 1 as trained (0.7)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another number, another sample")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
