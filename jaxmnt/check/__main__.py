"""python -m jaxmnt.check --config FILE [--devices 8] [key=value …]

Compares a small version of the config's model on several meshes with one device, on virtual CPU devices and random
rows: the loss and its metrics, the gradient of each parameter, the optimizer's update, and generation with a cache.
Names what differs. Use it for a model family, a loss or an optimizer of your own. Of the config's data, only the size
of the vocabulary is used.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmnt.commands import LOCAL_EXIT_CODES, Parser, run_command
from jaxmnt.config import load_config
from jaxmnt.errors import ConfigError, ExitCode, UserError

if TYPE_CHECKING:
    from jaxmnt.check.compare import Difference

_SHOWN = 3
"""Number of differences that are shown for a mesh."""


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    if options.devices < 2 or options.devices % 2:
        raise ConfigError(f"--devices: must be an even number of at least 2, not {options.devices}")
    config = load_config(options.config, options.overrides)

    from jaxmnt.plan.dry_run import with_vocabulary
    from jaxmnt.plan.targets import virtual_devices

    virtual_devices(options.devices)  # must come before anything that starts JAX
    from jaxmnt.check.compare import Checker
    from jaxmnt.check.meshes import trials

    config, vocab_size = with_vocabulary(config)
    one_device, *meshes = trials(config, options.devices)
    checker, failed = Checker(one_device, vocab_size), 0
    for trial in meshes:
        try:
            differences = checker.differences(trial)
        except UserError as error:
            print(f"{trial.name}: refused: {error}", flush=True)
            continue
        failed += bool(differences)
        _show(trial.name, differences)
    decoding = checker.decoding_differences()
    _show("generation", decoding)
    return ExitCode.FAILURE if failed or decoding else ExitCode.FINISHED


def _show(name: str, differences: "list[Difference]") -> None:
    """Prints the result for a mesh, or of generation."""
    print(f"{name}: {'DIFFERS' if differences else 'the same as one device'}", flush=True)
    for difference in differences[:_SHOWN]:
        remark = f" ({difference.remark})" if difference.remark else ""
        print(f"  {difference.name} is off by {difference.error:.1e} of its largest element{remark}", flush=True)
    if len(differences) > _SHOWN:
        print(f"  and {len(differences) - _SHOWN} more", flush=True)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.check", description=__doc__, codes=LOCAL_EXIT_CODES | {
        ExitCode.FAILURE: "something differs, or the command failed otherwise"
    })  # fmt: skip
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="YAML config")
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="number of virtual devices (8)")
    parser.add_settings()
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    run_command(main)
