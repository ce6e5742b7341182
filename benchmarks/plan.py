"""What the compiled programs of two models on 128 H100s need and send, as a table; no GPU is needed.

    python benchmarks/plan.py                                print it
    python benchmarks/plan.py --write docs/parallelism.md    put it between that file's markers

Needs the extra `plan`.
"""

import argparse
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from jaxmnt.config.load import load_config
from jaxmnt.plan.budget import ideal_state_bytes, least
from jaxmnt.plan.targets import find_chip, gpu_devices

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- table: benchmarks/plan.py -->", "<!-- end of table -->"
HOSTS, DEVICES_PER_HOST = 16, 8
MESHES = (
    {"fsdp": 128},
    {"fsdp": 16, "model": 8},
    {"data": 8, "pipeline": 2, "model": 8},
    {"data": 2, "pipeline": 8, "model": 8},
)
TABLE = (
    "model", "mesh", "peak memory, GiB", "state / ideal", "sent a step, GiB", "sent between hosts, GiB",
    "sent / minimum", "asynchronous", "idle",
)  # fmt: skip


def row(recipe: str, mesh: dict[str, int]) -> tuple[str, ...]:
    sizes = {"data": 1, "pipeline": 1, "fsdp": 1, "model": 1} | mesh
    config = load_config(ROOT / "configs" / f"{recipe}.yaml", [f"mesh.{axis}={size}" for axis, size in sizes.items()])
    chip = find_chip("h100")
    devices = gpu_devices(chip, HOSTS, DEVICES_PER_HOST)

    from jaxmnt.plan.budget import make_report
    from jaxmnt.training.compile import build_spec

    spec = build_spec(config, config.model.vocab_size, devices, lambda device: str(device.process_index))
    report = make_report(spec, lambda device: device.process_index, chip.memory)
    sent: Counter[tuple[str, str]] = Counter()
    for entry in report["collectives"]:
        sent[entry["kind"], entry["axis"]] += entry["bytes_sent"]
    total = sum(sent.values())
    across = sum(entry["bytes_sent"] for entry in report["collectives"] if entry["between"] == "hosts")
    hidden = sum(entry["bytes_sent"] * entry["asynchronous_share"] for entry in report["collectives"])
    memory, worst = report["memory"], max(sent[key] / size for key, size in least(spec).items())
    idle = f"{report['schedule']['idle_percent']} %" if report["schedule"] else "-"
    return (
        recipe,
        " × ".join(f"{axis} {size}" for axis, size in mesh.items()),
        f"{memory['peak'] / 2**30:.1f}",
        f"{(memory['params'] + memory['optimizer']) / ideal_state_bytes(spec):.4f}",
        f"{total / 2**30:.0f}",
        f"{across / 2**30:.0f}",
        f"{worst:.4f}",
        f"{hidden / total:.0%}",
        idle,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="Markdown file with the markers")
    options = parser.parse_args()
    rows = [
        TABLE,
        ("---",) * len(TABLE),
        *(row(recipe, mesh) for recipe in ("llama-8b", "qwen-72b") for mesh in MESHES),
    ]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in rows) + f"\n\nWith jax {version('jax')}."
    if options.write is None:
        print(table)
        return
    before, rest = options.write.read_text().split(BEGIN)
    options.write.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
