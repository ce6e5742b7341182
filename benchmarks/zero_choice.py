"""`mesh.zero: auto` held against compiled programs: each case is compiled with ZeRO 3, 2 and 1, and what auto chooses
must be within 5 % of the fastest that fits.

    python benchmarks/zero_choice.py

Needs the extra `plan`; no GPU. It takes some five minutes on two cores. Ends with 1 if a choice is further off.
"""

import sys
from dataclasses import replace
from pathlib import Path

from jaxmnt.config.load import load_config
from jaxmnt.plan.chips import CHIPS
from jaxmnt.plan.targets import gpu_devices

ROOT = Path(__file__).resolve().parents[1]
PER_HOST = 8
CASES = (
    ("qwen-72b", "b300", 128, "mesh.pipeline=2 mesh.fsdp=8 mesh.model=8 train.microbatch_size=1 "
                              "data.global_batch_size=1024"),
    ("qwen-72b", "h100", 128, "mesh.pipeline=2 mesh.data=2 mesh.fsdp=4 mesh.model=8 train.microbatch_size=1"),
    ("llama-8b", "h100", 128, "mesh.pipeline=4 mesh.data=2 mesh.fsdp=8 mesh.model=2 train.microbatch_size=1"),
    ("llama-8b", "h100", 128, ""),
    ("llama-8b", "h100", 128, "mesh.data=16 mesh.fsdp=8 train.microbatch_size=1"),
    ("llama-8b", "h100", 8, "model.preset=llama3.2-1b mesh.fsdp=8 train.microbatch_size=4"),
    ("llama-8b", "h200", 128, "model.preset=llama3.1-70b mesh.fsdp=16 mesh.model=8 train.microbatch_size=1 "
                              "train.remat=full data.global_batch_size=256"),
)  # fmt: skip
NEAR = 1.05


def main() -> int:
    print("| config | GPUs | settings | auto | ZeRO 3 | ZeRO 2 | ZeRO 1 | auto / best |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    furthest = 1.0
    for recipe, target, gpus, settings in CASES:
        chosen, compiled = _case(recipe, target, gpus, settings.split())
        best = min(seconds for seconds, peak, limit in compiled.values() if peak <= limit)
        ratio = compiled[chosen][0] / best
        furthest = max(furthest, ratio)
        cells = [
            f"{seconds:.3g} s, {peak / 2**30:.0f} GiB" + (" (too much)" if peak > limit else "")
            for seconds, peak, limit in compiled.values()
        ]
        row = (recipe, f"{gpus} {target}", f"`{settings}`" if settings else "as it is", str(chosen), *cells)
        print(f"| {' | '.join(row)} | {ratio:.3f} |", flush=True)
    return int(furthest > NEAR)


def _case(
    recipe: str, target: str, gpus: int, settings: list[str]
) -> tuple[int, dict[int, tuple[float, float, float]]]:
    """What auto chooses, and by ZeRO stage the compiled program's seconds, peak and limit."""
    chip = CHIPS[target]
    devices = list(gpu_devices(chip, gpus // PER_HOST, PER_HOST))
    from jaxmnt.plan.report import make_report
    from jaxmnt.plan.zero import choose_zero
    from jaxmnt.training.build import build_spec

    config = load_config(ROOT / "configs" / f"{recipe}.yaml", settings)
    assert config.model.vocab_size is not None
    host = lambda device: device.id // PER_HOST
    spec = build_spec(config, config.model.vocab_size, devices, lambda device: str(host(device)))
    choice = choose_zero(spec, chip)
    assert choice is not None
    found = {}
    for zero in (3, 2, 1):
        mesh = config.mesh.model_copy(update={"zero": zero})
        report = make_report(replace(spec, config=config.model_copy(update={"mesh": mesh})), host, chip)
        memory = report["memory"]
        found[zero] = report["prediction"]["step_seconds"], memory["peak"], memory["limit"]
    return choice.zero, found


if __name__ == "__main__":
    sys.exit(main())
