"""python -m jaxmnt.generate --run RUN_DIR [--prompt TEXT]: continues a prompt with a run's newest checkpoint."""

import argparse
from pathlib import Path

from jaxmnt.errors import ConfigError, ExitCode, run_command


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    if options.tokens < 1 or options.temperature < 0:
        raise ConfigError("--tokens takes a number from 1 up, --temperature one from 0 up")

    from jaxmnt.checkpoint.source import find
    from jaxmnt.data.sources import open_sources
    from jaxmnt.data.tokenizer import make_tokenizer
    from jaxmnt.runtime.rundir import read_config

    config = read_config(options.run)
    checkpoint = find(str(options.run), "--run")
    data = open_sources(config.data)
    tokenizer = make_tokenizer(data.tokenizer, data.folder)
    window = config.data.sequence_length
    end = tokenizer.end_of_document
    prompt = [end, *tokenizer.encode_batch([options.prompt])[0].tolist()]
    length = min(options.tokens, window - len(prompt))
    if length < 1:
        raise ConfigError(f"--prompt: {len(prompt)} tokens fill the model's window of {window}; shorten it")

    import numpy as np

    from jaxmnt.checkpoint.restore import restore
    from jaxmnt.cluster.environment import Identity
    from jaxmnt.program.compiled import single_device_setting
    from jaxmnt.program.sample import sample

    setting, abstract_params = single_device_setting(config, data.vocab_size)
    params = restore(checkpoint, {"params": abstract_params}, Identity()).state["params"]
    tokens = sample(setting, params, np.array(prompt, np.int32), length, options.temperature, options.seed)
    ended = np.flatnonzero(tokens == end)
    text = tokenizer.decode(tokens[: ended[0]] if len(ended) else tokens)
    print(options.prompt + text)
    return ExitCode.FINISHED


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m jaxmnt.generate", description=__doc__, allow_abbrev=False)
    parser.add_argument("--run", type=Path, required=True, metavar="RUN_DIR", help="run directory, as in run.dir")
    parser.add_argument("--prompt", default="", help="text to continue (default: the start of a document)")
    parser.add_argument("--tokens", type=int, default=200, help="at most so many new tokens (200)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is the likeliest; 1 as trained (0.7)")
    parser.add_argument("--seed", type=int, default=0, help="another number, another sample")
    parser.add_argument("--debug", action="store_true", help="show a traceback with an error")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
