"""python -m jaxmnt.convert from-hf|to-hf|from-peft|to-peft|settings: converts models and adapters of Hugging Face.

from-hf makes a run directory with one checkpoint, which run.init_from, jaxmnt.generate and jaxmnt.checkpoint accept
like any other; run.init_from: hf:FOLDER reads the same files directly onto a mesh. to-hf writes a checkpoint in the
format of transformers, with the tokenizer and the other files that came with the model; it merges adapters into their
base. from-peft and to-peft do the same for adapters alone. Neither torch nor an accelerator is needed.
"""

import argparse
import os
import sys
from pathlib import Path

from jaxmnt.commands import LOCAL_EXIT_CODES, Parser, path_argument, run_command
from jaxmnt.errors import ConfigError, ExitCode, counted
from jaxmnt.output import progress
from jaxmnt.telemetry.progress import Work, working

_DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX only computes shapes here
    with working("starting") as work:
        commands = {
            "from-hf": _from_hf, "to-hf": _to_hf, "from-peft": _from_peft, "to-peft": _to_peft, "settings": _settings,
        }  # fmt: skip
        return commands[options.command](options, work)


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
    from jaxmnt.huggingface.export import CheckpointArrays, plan_export, write_export
    from jaxmnt.lora.merge import MergedArrays, merged_arrays

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
    arrays: CheckpointArrays | MergedArrays
    if checkpoint.manifest.base is None:
        _refuse_base(options)
        arrays = CheckpointArrays(checkpoint)
    else:
        work.does("reading the adapters")
        arrays = merged_arrays(checkpoint, options.base)
    export = plan_export(checkpoint, arrays, files, tokenizer, options.dtype, int(options.file_gb * 1e9))
    work.does("")
    if tokenizer is not None and tokenizer.name == BYTES:
        print("note    the run's tokens are bytes, which need no tokenizer.json; config.json tells from-hf about them")
    if export.untrained_rows:
        rows = export.untrained_rows
        print(f"note    {rows} rows of the vocabulary are left out, because no id of the run's tokenizer has them")
    is_complete = write_export(export, options.output, process, processes, progress)
    progress("")
    if isinstance(arrays, MergedArrays) and arrays.lost_share and export.dtype.itemsize < 4:
        print(
            f"note    {arrays.lost_share:.1%} of the weights that the adapters change are as before, because the "
            f"change is lost in rounding to {export.dtype.name}; --dtype float32 keeps it"
        )
    if is_complete:
        count = len(export.files)
        contents = f"{count} file{'s' * (count > 1)} of {export.dtype.name}, {', '.join(sorted(export.companions))}"
        print(f"{options.output}: {contents}")
    else:
        print(f"the share of process {process} of {processes} is written; {options.output} appears when all shares are")
    return ExitCode.FINISHED


def _refuse_base(options: argparse.Namespace) -> None:
    if options.base is not None:
        raise ConfigError(f"--base: {options.checkpoint} has no adapters; leave it out")


def _from_peft(options: argparse.Namespace, work: Work) -> int:
    from jaxmnt.config.load import as_typed
    from jaxmnt.lora.from_peft import make_adapter_run

    work.does("")
    made = make_adapter_run(options.folder, options.output, options.base, progress)
    progress("")
    print(f"checkpoint {made.path}, beside the base {made.base}")
    if made.dropout:
        print(f"note    lora_dropout {made.dropout:g} is not applied here; it has no effect on a trained model")
    settings = (as_typed("lora.init_from", str(options.output)), as_typed("run.init_from", f"hf:{made.base}"))
    print(f"train on with {' '.join(settings)} and the settings of {options.output / 'config.yaml'}")
    return ExitCode.FINISHED


def _to_peft(options: argparse.Namespace, work: Work) -> int:
    from jaxmnt.checkpoint.refs import find
    from jaxmnt.lora.to_peft import write_peft

    checkpoint = find(options.checkpoint, "checkpoint")
    if checkpoint.manifest.base is None:
        raise ConfigError(f"checkpoint: {checkpoint.path} has no adapters; export the model with to-hf")
    work.does("")
    written = write_peft(checkpoint, options.output)
    print(f"{options.output}: adapters of {counted(written.weights, 'weight', 'weights')}, rank {written.rank}")
    if written.base is None:
        print(
            "note    the base is a run, which PEFT cannot read; export it with to-hf, and name that folder in "
            "base_model_name_or_path"
        )
    if written.whole:
        print(f"note    in modules_to_save, which not every server of adapters reads: {', '.join(written.whole)}")
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
    to_hf.add_argument(
        "--base",
        type=path_argument,
        metavar="hf:FOLDER|RUN",
        help="where the base of a run with adapters is now (where the run read it)",
    )
    to_hf.add_argument("--file-gb", type=float, default=5.0, metavar="GB", help="gigabytes per file (5)")
    to_hf.add_argument("--processes", type=int, metavar="N", help="write in N processes, on one host or several")
    to_hf.add_argument("--process-id", type=int, metavar="I", help="index of this process (default: from the launcher)")
    from_peft = add("from-peft", "make a run directory from adapters of PEFT and their base")
    from_peft.add_argument("folder", type=Path, metavar="FOLDER", help="folder with adapter_config.json")
    from_peft.add_argument("output", type=Path, metavar="RUN", help="a new run directory")
    from_peft.add_argument(
        "--base", type=path_argument, metavar="FOLDER", help="folder of the base (default: base_model_name_or_path)"
    )
    to_peft = add("to-peft", "write the adapters of a checkpoint as a folder for PEFT")
    to_peft.add_argument("checkpoint", metavar="RUN[@STEP]", help="run directory, or location of its checkpoints")
    to_peft.add_argument("output", type=Path, metavar="FOLDER", help="a new folder")
    settings = add("settings", "print the model of a folder as the model section of a config")
    settings.add_argument("folder", type=Path, metavar="FOLDER")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_command(main)
