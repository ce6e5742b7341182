"""What the compiled programs of two models on 128 GPUs need, send and wait for, as two tables; no GPU is needed.

    python benchmarks/plan.py                                print them
    python benchmarks/plan.py --write docs/parallelism.md    put them between that file's markers

Needs the extra `plan`.
"""

import argparse
import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxmnt.config.load import load_config
from jaxmnt.plan.budget import minimum_traffic
from jaxmnt.plan.chips import CHIPS
from jaxmnt.plan.report import ideal_state_bytes
from jaxmnt.plan.targets import gpu_devices

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- table: benchmarks/plan.py {} -->", "<!-- end of table -->"
HOSTS, DEVICES_PER_HOST = 16, 8
RECIPES = ("llama-8b", "qwen-72b")
MESHES = (
    ({"fsdp": 128}, 2),
    ({"fsdp": 16, "model": 8}, 2),
    ({"data": 8, "pipeline": 2, "model": 8}, 1),
    ({"data": 2, "pipeline": 8, "model": 8}, 2),
)
"""With rows of a microbatch. The first is the recipes' own."""

TABLE = (
    "model", "mesh", "peak memory, GiB", "state / ideal", "sent a step, GiB", "sent between hosts, GiB",
    "sent / minimum", "idle",
)  # fmt: skip


def planned(recipe: str, mesh: dict[str, int], rows: int, chip_name: str = "h100", *more: str) -> tuple[Any, Any]:
    """The step's spec, and the report of its program."""
    sizes = {"data": 1, "pipeline": 1, "fsdp": 1, "model": 1} | mesh
    overrides = [*(f"mesh.{axis}={size}" for axis, size in sizes.items()), f"train.microbatch_size={rows}", *more]
    config = load_config(ROOT / "configs" / f"{recipe}.yaml", overrides)
    chip = CHIPS[chip_name]
    devices = gpu_devices(chip, HOSTS, DEVICES_PER_HOST)

    from jaxmnt.plan.report import make_report
    from jaxmnt.training.build import build_spec

    spec = build_spec(config, config.model.vocab_size, devices, lambda device: str(device.process_index))
    return spec, make_report(spec, lambda device: device.process_index, chip)


def name_of(mesh: dict[str, int]) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in mesh.items())


def exposed(recipe: str, mesh: dict[str, int], rows: int) -> tuple[str, ...]:
    """What of a step is communication that nothing hides, on each chip: as it is, and without what is there to hide
    it."""
    cells = [recipe, name_of(mesh), str(rows)]
    for chip in EXPOSED_ON:
        now = planned(recipe, mesh, rows, chip)[1]["timeline"]
        with left_to_xla():
            before = planned(recipe, mesh, rows, chip, "mesh.prefetch=false", "model.overlap=off")[1]["timeline"]
        told = (f"{step['step_seconds']:.1f} s: {step['exposed_percent']:.1f} %" for step in (now, before))
        cells.append("{} ({})".format(*told))
    return tuple(cells)


@contextlib.contextmanager
def left_to_xla() -> Iterator[None]:
    """Inside, compile options are XLA's own: what XLA_FLAGS names is not set. XLA has read the variable already."""
    before = os.environ.get("XLA_FLAGS", "")
    names = "xla_gpu_experimental_parallel_collective_overlap_limit xla_gpu_memory_limit_slop_factor"
    os.environ["XLA_FLAGS"] = f"{before} {names}"
    try:
        yield
    finally:
        os.environ["XLA_FLAGS"] = before


EXPOSED_ON = ("h100", "h200", "b200")
EXPOSED = ("model", "mesh", "rows", *(name.upper() for name in EXPOSED_ON))


def row(recipe: str, mesh: dict[str, int], rows: int) -> tuple[str, ...]:
    spec, report = planned(recipe, mesh, rows)
    sent: Counter[tuple[str, str]] = Counter()
    for entry in report["collectives"]:
        sent[entry["kind"], entry["axis"]] += entry["bytes_sent"]
    total = sum(sent.values())
    across = sum(entry["bytes_sent"] for entry in report["collectives"] if entry["between"] == "hosts")
    memory, worst = report["memory"], max(sent[key] / size for key, size in minimum_traffic(spec).items())
    idle = f"{report['schedule']['idle_percent']} %" if report["schedule"] else "-"
    return (
        recipe,
        name_of(mesh),
        f"{memory['peak'] / 2**30:.1f}",
        f"{(memory['params'] + memory['optimizer']) / ideal_state_bytes(spec):.4f}",
        f"{total / 2**30:.0f}",
        f"{across / 2**30:.0f}",
        f"{worst:.4f}",
        idle,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="Markdown file with the markers")
    options = parser.parse_args()
    for name, head, make in (("sent", TABLE, row), ("exposed", EXPOSED, exposed)):
        rows = [head, ("---",) * len(head), *(make(recipe, *mesh) for recipe in RECIPES for mesh in MESHES)]
        table = "\n".join("| " + " | ".join(cells) + " |" for cells in rows) + f"\n\nWith jax {version('jax')}."
        print(table, flush=True)
        if options.write is not None:
            begin = BEGIN.format(name)
            before, rest = options.write.read_text().split(begin)
            after = rest.split(END, 1)[1]
            options.write.write_text(f"{before}{begin}\n\n{table}\n\n{END}{after}")


if __name__ == "__main__":
    main()
