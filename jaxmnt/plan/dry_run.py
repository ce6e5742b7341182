"""Implements `--dry-run`, which reports what a config would do on a cluster, without the cluster, its data, or
training."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmnt.config import Config
from jaxmnt.config.own_code import attributing_user_errors
from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.plan.calibration import check_calibration, read_calibration
from jaxmnt.plan.chips import CHIPS, Chip, Network, find_target
from jaxmnt.plan.targets import gpu_devices, silence_xla_warnings, virtual_devices
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.progress import Work, working

if TYPE_CHECKING:
    import jax

DEVICES_PER_HOST = 8
"""Default number of CPU devices per host."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a dry run to a parser."""
    group = parser.add_argument_group("dry run")
    group.add_argument("--dry-run", action="store_true", help="compile for a cluster, print the plan, and stop")
    group.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="plan for N virtual CPU devices (default: the mesh's, if none of its axes is -1)",
    )
    group.add_argument(
        "--target", metavar="CHIP", help=f"plan for this GPU: {', '.join(CHIPS)}; or an instance type of a cloud"
    )
    group.add_argument(
        "--hosts",
        type=int,
        metavar="N",
        help="hosts of the target (default: what the mesh needs, if none of its axes is -1)",
    )
    group.add_argument(
        "--devices-per-host",
        type=int,
        metavar="N",
        help=f"devices per host (default: the target's, or {DEVICES_PER_HOST} CPU devices)",
    )
    group.add_argument(
        "--calibration", type=Path, metavar="FILE", help="rates that preflight --calibrate measured, for the plan"
    )
    group.add_argument("--json", action="store_true", help="print the plan as JSON")


def check_arguments(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for options that cannot be combined."""
    names = ("devices", "target", "hosts", "devices_per_host", "calibration", "json")
    plan_options = [name for name in names if getattr(options, name)]
    if plan_options and not options.dry_run:
        raise ConfigError(f"--{plan_options[0].replace('_', '-')}: it applies only to plans; add --dry-run")
    if options.devices is not None and options.target is not None:
        raise ConfigError("--devices: virtual CPU devices and a --target exclude each other; give one of them")
    for name in ("devices", "hosts", "devices_per_host"):
        number = getattr(options, name)
        if number is not None and number < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: must be at least 1, not {number}")
    if options.hosts is not None and options.target is None:
        raise ConfigError("--hosts: applies only with --target; give --target as well")


def dry_run(config: Config, options: argparse.Namespace) -> int:
    """Prints the plan and returns the exit code. Raises `ConfigError` for a config with which training could not
    start."""
    with working("starting") as work:
        text = _plan(config, options, work)
    print(text)
    return ExitCode.FINISHED


def _plan(config: Config, options: argparse.Namespace, work: Work) -> str:
    """Makes the plan and returns it as text or JSON."""
    calibration = None if options.calibration is None else read_calibration(options.calibration)
    silence_xla_warnings(options.debug)
    devices, hosts, chip, network = _target_devices(config, options)
    config, vocab = with_vocabulary(config)

    from jaxmnt.plan.rates import rates_of
    from jaxmnt.plan.report import make_report
    from jaxmnt.plan.show import plan_text
    from jaxmnt.plan.zero import resolve_zero
    from jaxmnt.training.build import build_spec

    rates = None if chip is None else rates_of(chip, network)
    if calibration is not None:
        check_calibration(calibration, options.calibration, chip, len({*map(hosts, devices)}), len(devices))
        rates = calibration.rates(rates)
    work.does("building the program")
    with attributing_user_errors(config):
        spec = build_spec(config, vocab, devices, lambda device: f"host {hosts(device)}")
        spec, zero = resolve_zero(spec)
        work.does("compiling")
        report = make_report(spec, hosts, chip, rates) | {"zero": None if zero is None else zero.to_json()}
    return json_text(report, indent=2) if options.json else plan_text(spec, report, hosts, zero)


def _target_devices(
    config: Config, options: argparse.Namespace
) -> "tuple[list[jax.Device], Callable[[jax.Device], int], Chip | None, Network | None]":
    """Returns the devices, a function that maps a device to the number of its group with fast links, the chip, and the
    network. The last two are None for CPU devices."""
    if options.target is None:
        count = options.devices or _devices_of_mesh(config, "--devices")
        per_host = options.devices_per_host or DEVICES_PER_HOST
        return list(virtual_devices(count)), lambda device: device.id // per_host, None, None
    chip, network = find_target(options.target)
    hosts, per_host = cluster_size(config, network, options.hosts, options.devices_per_host)
    fast_group = per_host if network.domain == network.devices_per_host else network.domain
    return list(gpu_devices(chip, hosts, per_host)), lambda device: device.id // fast_group, chip, network


def cluster_size(
    config: Config, network: Network, hosts: int | None = None, devices_per_host: int | None = None
) -> tuple[int, int]:
    """Returns the number of hosts and of GPUs per host. The user may have given neither, one or both of them.

    Raises `ConfigError` if the mesh does not determine the number of GPUs.
    """
    if hosts is not None and _inferred_axis(config) is not None:
        return hosts, devices_per_host or network.devices_per_host
    num_devices = _devices_of_mesh(config, "--hosts")
    per_host = devices_per_host or min(num_devices, network.devices_per_host)
    if hosts is None and num_devices % per_host:
        raise ConfigError(f"--hosts: the mesh's {num_devices} devices do not fill hosts of {per_host}; give --hosts")
    return hosts or num_devices // per_host, per_host


def _inferred_axis(config: Config) -> str | None:
    """Returns the axis of size -1, which takes all devices that the other axes leave, or None if there is no such
    axis."""
    return next((axis for axis, size in config.mesh.sizes().items() if size == -1), None)


def _devices_of_mesh(config: Config, option: str) -> int:
    """Returns the number of devices in the mesh. Raises `ConfigError` if the mesh does not determine it without
    `option`."""
    if (axis := _inferred_axis(config)) is not None:
        raise ConfigError(
            f"{option}: mesh.{axis} takes all devices that the other axes leave (-1), so their number is unknown; "
            f"give {option}"
        )
    return math.prod(config.mesh.sizes().values())


def with_vocabulary(config: Config) -> tuple[Config, int]:
    """Returns the config with `model.vocab_size` set, and the vocabulary size of its data. The data are read only if
    the config does not set the size."""
    if config.model.vocab_size is not None:
        return config, config.model.vocab_size
    from jaxmnt.data.sources import fit_to_data, open_sources

    data = open_sources(config.data)
    return fit_to_data(config, data), data.vocab_size
