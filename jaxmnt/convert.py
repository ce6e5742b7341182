"""python -m jaxmnt.convert from-hf|to-hf|settings: converts models from and to the files of Hugging Face.

from-hf makes a run directory with one checkpoint, which run.init_from, jaxmnt.generate and jaxmnt.checkpoint accept
like any other; run.init_from: hf:FOLDER reads the same files directly onto a mesh. to-hf writes a checkpoint in the
format of transformers, with the tokenizer and the other files that came with the model. Neither torch nor an
accelerator is needed.
"""

import argparse
import os
import sys
from pathlib import Path

from jaxmnt.commands import LOCAL_EXIT_CODES, Parser, run_command
from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.output import progress
from jaxmnt.telemetry.progress import Work, working

_DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX only computes shapes here
    with working("starting") as work:
        return {"from-hf": _from_hf, "to-hf": _to_hf, "settings": _settings}[options.command](options, work)


def _from_hf(options: argparse.Namespace, work: Work) -> int:
    from jaxmnt.config.load import as_typed
    from jaxmnt.huggingface.config import scaled_settings
    from jaxmnt.huggingface.folder import Folder
    from jaxmnt.huggingface.run_from import make_run

    folder = Folder(options.folder, "from-hf")
    work.does("")
    path = make_run(folder, options.output, options.dtype, progress)
    progress("")
    print(f"checkpoint {path}")
    for note in scaled_settings(folder.config):
        print(f"note    {note}")
    if not (options.output / "tokenizer").exists():
        print(
            f"note    {options.folder} has no tokenizer.json with an end-of-text token, so the run has no tokenizer; "
            "give generate and score --tokenizer bytes, or --tokenizer with the tokenizer.json of its tokens",
            file=sys.stderr,
        )
    setting = as_typed("run.init_from", str(options.output))
    print(f"train from it with {setting} and the settings of {options.output / 'config.yaml'}")
    return ExitCode.FINISHED


def _to_hf(options: argparse.Namespace, work: Work) -> int:
    from jaxmnt.checkpoint.refs import find, roots_of, tokenizer_of
    from jaxmnt.data.manifest import BYTES, TOKENIZER_FILE
    from jaxmnt.huggingface import companions
    from jaxmnt.huggingface.export import plan_export, write_export

    if options.file_gb <= 0:
        raise ConfigError("--file-gb must be above 0")
    process, processes = _process_numbers(options)
    checkpoint = find(options.checkpoint, "checkpoint")
    files = companions.read_run_files(roots_of(options.checkpoint, checkpoint))
    try:
        tokenizer = tokenizer_of(options.checkpoint, checkpoint)
    except ConfigError as error:  # an old run did not keep its tokenizer, and its data may not be on this machine
        tokenizer = None
        if TOKENIZER_FILE not in files:
            work.line(f"note    {options.output} has no tokenizer: {error}")
    export = plan_export(checkpoint, files, tokenizer, options.dtype, int(options.file_gb * 1e9))
    work.does("")
    if tokenizer is not None and tokenizer.name == BYTES:
        print("note    the run's tokens are bytes, which need no tokenizer.json; config.json tells from-hf about them")
    if export.untrained_rows:
        rows = export.untrained_rows
        print(f"note    {rows} rows of the vocabulary are left out, because no id of the run's tokenizer has them")
    is_complete = write_export(export, options.output, process, processes, progress)
    progress("")
    if is_complete:
        count = len(export.files)
        contents = f"{count} file{'s' * (count > 1)} of {export.dtype.name}, {', '.join(sorted(export.companions))}"
        print(f"{options.output}: {contents}")
    else:
        print(f"the share of process {process} of {processes} is written; {options.output} appears when all shares are")
    return ExitCode.FINISHED


def _settings(options: argparse.Namespace, work: Work) -> int:
    import yaml

    from jaxmnt.huggingface.config import read_config, scaled_settings
    from jaxmnt.huggingface.folder import CONFIG, Folder

    folder = Folder(options.folder, "settings")
    tree = {"model": read_config(folder.config, str(folder.path / CONFIG))}
    work.does("")
    for note in scaled_settings(folder.config):
        print(f"# {note}")
    print(yaml.safe_dump(tree, sort_keys=False), end="")
    return ExitCode.FINISHED


def _process_numbers(options: argparse.Namespace) -> tuple[int, int]:
    """Returns the index of this process and the number of processes, from the arguments or from the launcher."""
    process, processes = options.process_id, options.processes
    if process is None and processes is None:
        from jaxmnt.config.schema import Cluster
        from jaxmnt.distributed.identity import identify

        identity = identify(Cluster(), gpus=0)
        return identity.process_id, identity.processes
    if process is None or processes is None or not 0 <= process < processes:
        raise ConfigError("--process-id: give it together with --processes N, as a number from 0 to N - 1")
    return process, processes


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.convert", description=__doc__, codes=LOCAL_EXIT_CODES)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> Parser:
        return commands.add_parser(name, help=text, description=text, codes=LOCAL_EXIT_CODES)

    from_hf = add("from-hf", "make a run directory from a Hugging Face model folder")
    from_hf.add_argument("folder", type=Path, metavar="FOLDER", help="folder with config.json and safetensors files")
    from_hf.add_argument("output", type=Path, metavar="RUN", help="a new run directory")
    from_hf.add_argument("--dtype", choices=_DTYPES[:2], default="float32", help="dtype of the parameters (float32)")
    to_hf = add("to-hf", "write a checkpoint as a Hugging Face model folder")
    to_hf.add_argument("checkpoint", metavar="RUN[@STEP]", help="run directory, or location of its checkpoints")
    to_hf.add_argument("output", type=Path, metavar="FOLDER", help="a new folder")
    to_hf.add_argument(
        "--dtype", choices=_DTYPES, help="default: that of the model that the run came from, else float32"
    )
    to_hf.add_argument("--file-gb", type=float, default=5.0, metavar="GB", help="gigabytes per file (5)")
    to_hf.add_argument("--processes", type=int, metavar="N", help="write in N processes, on one host or several")
    to_hf.add_argument("--process-id", type=int, metavar="I", help="index of this process (default: from the launcher)")
    settings = add("settings", "print the model of a folder as the model section of a config")
    settings.add_argument("folder", type=Path, metavar="FOLDER")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
