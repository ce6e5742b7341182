"""jaxmnt COMMAND …: runs the same commands as python -m jaxmnt.COMMAND."""

import sys
from importlib import import_module

from jaxmnt import __version__, early_signals
from jaxmnt.commands import RUN_EXIT_CODES, exit_codes, run_command, wrapped
from jaxmnt.errors import ConfigError, ExitCode, suggest

COMMANDS = {
    "train": ("jaxmnt.train", "train a model"),
    "prepare": ("jaxmnt.prepare", "turn text into the shards that training reads"),
    "data": ("jaxmnt.data.__main__", "show the data that a config feeds to the model, and what was in a step's batch"),
    "checkpoint": ("jaxmnt.checkpoint.__main__", "list, verify, show, compare and export checkpoints"),
    "preflight": ("jaxmnt.preflight.__main__", "check the hosts of a run and the network between them"),
    "plan": ("jaxmnt.plan.__main__", "find the best mesh for a run, and what the run takes and costs"),
    "simulate": ("jaxmnt.simulate", "simulate the failures and restarts of a long run on many GPUs"),
    "check": ("jaxmnt.check.__main__", "compare a model family, a loss or an optimizer on meshes with one device"),
    "launch": ("jaxmnt.launch.__main__", "start the processes of a run"),
    "bench": ("jaxmnt.bench.__main__", "measure how a run scales over processes"),
    "drill": ("jaxmnt.drill.__main__", "inject the failures of a long run into a small version of its config"),
    "report": ("jaxmnt.report.__main__", "show where the time of a run went, and what it cost"),
    "generate": ("jaxmnt.generate", "continue a prompt with a trained model"),
    "score": ("jaxmnt.score", "compute log-likelihoods of texts with a trained model"),
    "lm_eval": ("jaxmnt.lm_eval", "run tasks of the lm-evaluation-harness on a trained model"),
    "convert": ("jaxmnt.convert", "convert models from and to the files of Hugging Face"),
    "schema": ("jaxmnt.schema", "print the JSON schema of a config, for editors"),
}


def main() -> None:
    run_command(_dispatch)


def _dispatch(arguments: list[str]) -> int:
    command, *rest = arguments or ["--help"]
    if command == "--version":
        print(f"jaxmnt {__version__}")
        return ExitCode.FINISHED
    if command in ("-h", "--help", "help"):
        print(_help())
        return ExitCode.FINISHED
    if command not in COMMANDS:
        raise ConfigError(f"unknown command {command!r}; {suggest(command, list(COMMANDS))}")
    if command == "train":
        early_signals.remember()
    if not sys.flags.safe_path:
        sys.path.insert(0, "")  # as python -m does, because a config may name modules in this folder
    module = import_module(COMMANDS[command][0])
    return int(module.command(rest) if command == "train" else module.main(rest))


def _help() -> str:
    parts = [
        "usage: jaxmnt COMMAND …  (each also runs as python -m jaxmnt.COMMAND)\n       jaxmnt --version\n",
        *(f"  {name:<10}  {text}" for name, (_, text) in COMMANDS.items()),
        "\njaxmnt COMMAND --help shows a command's arguments and its own exit codes.\n\n" + exit_codes(RUN_EXIT_CODES),
    ]
    return wrapped("\n".join(parts))


if __name__ == "__main__":
    main()
