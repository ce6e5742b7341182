"""Reads and writes files with rates that were measured on the user's own hosts. They replace the rates from the data
sheets of those devices. Does not import JAX."""

import math
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from jaxmnt.errors import ConfigError
from jaxmnt.plan.chips import Chip
from jaxmnt.plan.rates import BETWEEN_HOSTS, GRADIENT, WITHIN_HOST, CollectiveRate, Curve, Rates
from jaxmnt.strict_json import json_text

FORMAT = 1
"""Version of the file's format."""
CPU = "cpu"
"""JAX's name for CPU devices."""


class _Part(BaseModel):
    """A part of the file. Unknown keys and numbers that are not finite are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Products(_Part):
    """FLOP/s of matrix products [m, k] × [k, n], for all combinations of m, n and k from `sizes`."""

    dtype: str
    gradient: bool
    """True if the product contracts over rows, as a weight's gradient does."""
    sizes: tuple[PositiveFloat, ...]
    rates: tuple[PositiveFloat, ...]
    """Rates for all (m, n, k), in which k varies fastest and m slowest."""


class Attention(_Part):
    """Rates of attention in long rows. They count only the pairs that a causal mask leaves."""

    forward: PositiveFloat
    """FLOP/s in the forward pass."""
    backward: PositiveFloat
    """FLOP/s in the backward pass."""
    half_length: float
    """The row length at which attention attains half of these rates."""


class Collective(_Part):
    """The terms of a collective's duration. It is `start` seconds, plus `step` seconds for each step of a ring, plus
    the time of its bytes at `rate` bytes per second."""

    kind: str
    place: str
    """`rates.WITHIN_HOST` or `rates.BETWEEN_HOSTS`."""
    start: float
    step: float
    rate: PositiveFloat


class Calibration(_Part):
    """Measured rates of devices of one kind, per device, while all devices are busy."""

    format: PositiveInt = FORMAT
    kind: str
    """JAX's name for the device."""
    devices: PositiveInt
    hosts: PositiveInt
    date: str
    software: dict[str, str]
    products: tuple[Products, ...]
    memory: PositiveFloat
    """Bytes per second of work that is neither a matrix product nor attention."""
    instruction: float
    """Seconds to start each instruction."""
    page_faults: float
    """Seconds that the operating system takes per byte of temporary memory that it maps anew in each step."""
    attention: Attention | None = None
    """None if attention consists of matrix products."""
    to_host: PositiveFloat | None = None
    """Bytes per second to the host's memory; None if a device has no memory of its own."""
    collectives: tuple[Collective, ...] = ()

    def rates(self, table: Rates | None) -> Rates:
        """Returns the measured rates, and the rates of `table` for what was not measured.

        Without a table, attention runs at the rate of matrix products, and collectives that were not measured take no
        time. `check_calibration` refuses a calibration that lacks collectives which the plan uses.
        """
        curves = {
            (product.dtype, GRADIENT if product.gradient else ""): Curve(product.sizes, product.rates)
            for product in self.products
        }
        largest_rates = {dtype: max(curve.rates) for (dtype, gradient), curve in curves.items() if not gradient}
        collectives = {
            (measured.kind, measured.place): CollectiveRate(measured.start, measured.step, measured.rate)
            for measured in self.collectives
        }
        table = table or Rates(
            products={}, attention=max(largest_rates.values()), memory=self.memory,
            within_host=math.inf, between_hosts=math.inf, to_host=math.inf,
        )  # fmt: skip

        def link_rate(place: str, default: float) -> float:
            gather = collectives.get(("all-gather", place))
            return gather.rate if gather else default

        rates = replace(
            table,
            products={**table.products, **largest_rates},
            curves=curves,
            memory=self.memory,
            instruction=self.instruction,
            page_faults=self.page_faults,
            to_host=self.to_host or table.to_host,
            within_host=link_rate(WITHIN_HOST, table.within_host),
            between_hosts=link_rate(BETWEEN_HOSTS, table.between_hosts),
            collectives=collectives,
        )
        if self.attention is None:
            return rates
        return replace(
            rates,
            attention=self.attention.forward,
            attention_backward=self.attention.backward,
            length=self.attention.half_length,
        )


def read_calibration(path: Path) -> Calibration:
    """Reads a calibration file. Raises `ConfigError` if it cannot be read or has other contents."""
    try:
        calibration = Calibration.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--calibration: {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"--calibration: {path} was not written by preflight --calibrate: {where}: {first['msg']}; measure again"
        ) from error
    is_complete = all(len(product.rates) == len(product.sizes) ** 3 for product in calibration.products)
    if calibration.format != FORMAT or not is_complete:
        raise ConfigError(f"--calibration: {path} is of another version (format {calibration.format}); measure again")
    return calibration


def check_calibration(calibration: Calibration, path: Path, chip: Chip | None, hosts: int, devices: int) -> None:
    """Checks that a plan can use a calibration. `chip` is None for virtual CPU devices.

    Raises `ConfigError` if other devices were measured, or if collectives that the plan uses were not measured and no
    data sheet has their rates.
    """
    kind = CPU if chip is None else chip.kind
    if calibration.kind != kind:
        raise ConfigError(f"--calibration: {path} was measured on {calibration.kind}, and the plan is for {kind}")
    needed_places = [BETWEEN_HOSTS] if hosts > 1 else []
    needed_places += [WITHIN_HOST] if devices > hosts else []
    for place in needed_places:
        if chip is None and not any(collective.place == place for collective in calibration.collectives):
            raise ConfigError(
                f"--calibration: {path} has no collectives {place}: it was measured on {calibration.devices} devices "
                f"of {calibration.hosts} hosts; measure on hosts like those of the mesh, or set --devices-per-host"
            )


def summary(calibration: Calibration) -> str:
    """Returns a line with the most important rates of a calibration."""
    best = ", ".join(
        f"{max(product.rates) / 1e12:.3g} TFLOP/s in {product.dtype}"
        for product in calibration.products
        if not product.gradient
    )
    links = [
        f"all-gather {collective.rate / 1e9:.3g} GB/s {collective.place}"
        for collective in calibration.collectives
        if collective.kind == "all-gather"
    ]
    return ", ".join([f"products up to {best}", f"memory {calibration.memory / 1e9:.3g} GB/s", *links])


def to_text(calibration: Calibration) -> str:
    """Returns the contents of a calibration file."""
    return json_text(calibration.model_dump(), indent=1) + "\n"
