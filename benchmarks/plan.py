"""What the compiled programs of two models on 128 GPUs need, send and wait for, as two tables; no GPU is needed.

    python benchmarks/plan.py                                print them
    python benchmarks/plan.py --write docs/parallelism.md    put them between that file's markers
    python benchmarks/plan.py --save FOLDER                  write the programs instead, for benchmarks/exposed.py

Needs the extra `plan`.
"""

import argparse
import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
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


def planned(
    recipe: str,
    mesh: dict[str, int],
    rows: int,
    chip_name: str = "h100",
    *more: str,
    keep_text: Callable[[str], Any] = lambda text: None,
) -> tuple[Any, Any]:
    """The step's spec, and the report of its program. `keep_text` is called with the program's text."""
    sizes = {"data": 1, "pipeline": 1, "fsdp": 1, "model": 1} | mesh
    overrides = [*(f"mesh.{axis}={size}" for axis, size in sizes.items()), f"train.microbatch_size={rows}", *more]
    config = load_config(ROOT / "configs" / f"{recipe}.yaml", overrides)
    chip = CHIPS[chip_name]
    devices = gpu_devices(chip, HOSTS, DEVICES_PER_HOST)

    from jaxmnt.plan.report import make_report
    from jaxmnt.training.build import build_spec

    spec = build_spec(config, config.model.vocab_size, devices, lambda device: str(device.process_index))
    return spec, make_report(spec, lambda device: device.process_index, chip, keep_text=keep_text)


def name_of(mesh: dict[str, int]) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in mesh.items())


WITHOUT_OVERLAP = ("mesh.prefetch=false", "model.overlap=off", "train.overlap_microbatches=false")


def exposed(recipe: str, mesh: dict[str, int], rows: int) -> tuple[str, ...]:
    """What of a step is communication that nothing hides, on each chip: as it is, and without what is there to hide
    it."""
    cells = [recipe, name_of(mesh), str(rows)]
    for chip in EXPOSED_ON:
        now = planned(recipe, mesh, rows, chip)[1]["timeline"]
        with left_to_xla():
            before = planned(recipe, mesh, rows, chip, *WITHOUT_OVERLAP)[1]["timeline"]
        told = (f"{step['step_seconds']:.1f} s: {step['exposed_percent']:.1f} %" for step in (now, before))
        cells.append("{} ({})".format(*told))
    return tuple(cells)


@contextlib.contextmanager
def left_to_xla() -> Iterator[None]:
    """Inside, compile options are XLA's own: what XLA_FLAGS names is not set. XLA has read the variable already."""
    before = os.environ.get("XLA_FLAGS", "")
    names = (
        "xla_gpu_experimental_parallel_collective_overlap_limit", "xla_gpu_memory_limit_slop_factor",
        "xla_gpu_enable_triton_gemm",
    )  # fmt: skip
    os.environ["XLA_FLAGS"] = " ".join((before, *names))
    try:
        yield
    finally:
        os.environ["XLA_FLAGS"] = before


EXPOSED_ON = ("h100", "h200", "b200", "b300")
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


PUBLISHED = ("qwen-72b", {"data": 8, "pipeline": 2, "model": 8})
"""The recipe and the mesh of a published run of Qwen 2.5 72B on 16 hosts of 8 B300s."""
OF_PUBLISHED = (
    "model.preset=qwen2.5-72b", "mesh.zero=1", "data.global_batch_size=1024", "data.sequence_length=4096",
    "train.remat=dots",
)  # fmt: skip


def save(folder: Path, only: str) -> None:
    """Writes the program of each mesh, and the plan's report about it."""
    cases: dict[str, tuple[Any, ...]] = {
        f"{recipe}-{'-'.join(f'{axis}{size}' for axis, size in mesh.items())}-{chip}": (recipe, mesh, rows, chip)
        for recipe in RECIPES
        for mesh, rows in MESHES
        for chip in EXPOSED_ON
    }
    for rows in (1, 2, 4):
        cases[f"published-b300-{rows}-rows"] = (*PUBLISHED, rows, "b300", *OF_PUBLISHED)
    folder.mkdir(parents=True, exist_ok=True)
    for name, case in cases.items():
        if fnmatchcase(name, only):
            _, report = planned(*case, keep_text=(folder / f"{name}.hlo").write_text)
            (folder / f"{name}.json").write_text(json.dumps(report, default=str))
            step = report["timeline"]
            print(
                f"{name}: step {step['step_seconds']} s, exposed {step['exposed_seconds']} s, temporary memory "
                f"{report['memory']['temporary'] / 2**30:.2f} GiB, conditions {step['conditions']:.0f}, compiled in "
                f"{report['compile_seconds']} s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="Markdown file with the markers")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the programs of all meshes here")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="with --save: the names of the programs")
    options = parser.parse_args()
    if options.save is not None:
        save(options.save, options.only)
        return
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
