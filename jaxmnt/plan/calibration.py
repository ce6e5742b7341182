"""Rates measured on the user's own hosts, stored in a file. They replace the table values of those devices. No JAX."""

import math
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from jaxmnt.errors import ConfigError
from jaxmnt.plan.chips import Chip
from jaxmnt.plan.rates import BETWEEN_HOSTS, GRADIENT, WITHIN_HOST, CollectiveRate, Curve, Rates
from jaxmnt.strict_json import json_text

FORMAT = 1
CPU = "cpu"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Products(_Part):
    """FLOP/s of matrix products at all combinations of sizes of m, n and k, k fastest."""

    dtype: str
    gradient: bool
    """True if the product contracts over rows, as a weight's gradient does."""
    sizes: tuple[PositiveFloat, ...]
    rates: tuple[PositiveFloat, ...]


class Attention(_Part):
    """FLOP/s of attention on long rows, over the pairs that a causal mask leaves, and the row length that attains
    half."""

    forward: PositiveFloat
    backward: PositiveFloat
    half_length: float


class Collective(_Part):
    """Duration of one collective in seconds: `start`, `step` for each step of a ring, and its bytes at `rate` per
    second."""

    kind: str
    place: str
    start: float
    step: float
    rate: PositiveFloat


class Calibration(_Part):
    """Measured rates of devices of one kind. They are per second and per device, while all devices compute."""

    format: PositiveInt = FORMAT
    kind: str
    """JAX's name of the device."""
    devices: PositiveInt
    hosts: PositiveInt
    date: str
    software: dict[str, str]
    products: tuple[Products, ...]
    memory: PositiveFloat
    """Bytes per second of work that is neither a matrix product nor attention."""
    instruction: float
    """Minimum seconds of each instruction."""
    page_faults: float
    """Seconds that the kernel takes per byte of temporary memory that it maps anew in each step."""
    attention: Attention | None = None
    """None where attention consists of matrix products."""
    to_host: PositiveFloat | None = None
    """Bytes per second to the host's memory, if a device has memory of its own."""
    collectives: tuple[Collective, ...] = ()

    def rates(self, table: Rates | None) -> Rates:
        """Returns the measured rates, and the table's rates for what was not measured. Without a table, attention runs
        at the rate of matrix products, and collectives that were not measured take no time: see `check_fits`."""
        curves = {
            (product.dtype, GRADIENT if product.gradient else ""): Curve(product.sizes, product.rates)
            for product in self.products
        }
        largest = {dtype: max(curve.rates) for (dtype, gradient), curve in curves.items() if not gradient}
        collectives = {
            (measured.kind, measured.place): CollectiveRate(measured.start, measured.step, measured.rate)
            for measured in self.collectives
        }
        table = table or Rates(
            products={}, attention=max(largest.values()), memory=self.memory,
            within_host=math.inf, between_hosts=math.inf, to_host=math.inf,
        )  # fmt: skip

        def link_rate(place: str, default: float) -> float:
            gather = collectives.get(("all-gather", place))
            return gather.rate if gather else default

        rates = replace(
            table,
            products={**table.products, **largest},
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
    """Reads a calibration file. Raises `ConfigError` if it is not one."""
    try:
        calibration = Calibration.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--calibration: {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"--calibration: {path} must be a file of preflight --calibrate: {where}: {first['msg']}; measure again"
        ) from error
    is_complete = all(len(product.rates) == len(product.sizes) ** 3 for product in calibration.products)
    if calibration.format != FORMAT or not is_complete:
        raise ConfigError(f"--calibration: {path} is of another version (format {calibration.format}); measure again")
    return calibration


def check_fits(calibration: Calibration, path: Path, chip: Chip | None, hosts: int, devices: int) -> None:
    """Raises `ConfigError` if a calibration is of other devices than the plan's (virtual CPU devices without a chip),
    or if it lacks a link that the plan uses and no table has."""
    kind = CPU if chip is None else chip.kind
    if calibration.kind != kind:
        raise ConfigError(f"--calibration: {path} was measured on {calibration.kind}, and the plan is for {kind}")
    needed = [place for place, is_needed in ((BETWEEN_HOSTS, hosts > 1), (WITHIN_HOST, devices > hosts)) if is_needed]
    for place in needed:
        if chip is None and not any(collective.place == place for collective in calibration.collectives):
            raise ConfigError(
                f"--calibration: {path} has no collectives {place}: it was measured on {calibration.devices} devices "
                f"of {calibration.hosts} hosts; measure on hosts like those of the mesh, or set --devices-per-host"
            )


def summary(calibration: Calibration) -> str:
    """Summarises a calibration in one line."""
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
    return json_text(calibration.model_dump(), indent=1) + "\n"
