"""The search against a grid: is the mesh that it finds the best?

    python benchmarks/plan_search.py                  all cases, against the best of 30 plans more of each
    python benchmarks/plan_search.py --grid 200 8B128 one case, against 200
    python benchmarks/plan_search.py --grid 1000 8B8  one case, against all that may fit, some 500

The grid has all ways that divide, without the search's rules. If more of them may fit than are compiled, those that are
estimated to be fastest count, and as many at random of the others. Needs the extra `plan`; no GPU.
"""

import argparse
import contextlib
import random
import sys
import time
from pathlib import Path

from jaxmnt.config.load import load_config
from jaxmnt.errors import ConfigError
from jaxmnt.plan.__main__ import DEFAULT_COMPILATIONS
from jaxmnt.plan.chips import find_target
from jaxmnt.plan.rates import rates_of
from jaxmnt.plan.targets import gpu_devices

ROOT = Path(__file__).resolve().parents[1]
CASES = {
    "8B8": ("llama-8b", 8),
    "8B128": ("llama-8b", 128),
    "8B1024": ("llama-8b", 1024),
    "72B128": ("qwen-72b", 128),
    "72B1024": ("qwen-72b", 1024),
}


def compared(name: str, target: str, grid: int) -> str:
    """A line of the table."""
    from jaxmnt.plan.search import Search, describe

    recipe, gpus = CASES[name]
    chip, network = find_target(target)
    config = load_config(ROOT / "configs" / f"{recipe}.yaml", [])
    began = time.perf_counter()
    search = Search(config, chip, network, rates_of(chip, network))
    guesses = search.guesses(gpus)
    plans = search.best(guesses, DEFAULT_COMPILATIONS)
    took = time.perf_counter() - began
    if not plans:
        return f"| {name} | {len(guesses)} | {took:.0f} s | nothing fits | | |"
    best = plans[0]
    seen = {plan.candidate for plan in plans}
    everything = [guess for guess in search.guesses(gpus, pruned=False) if search.may_fit(guess)]
    rest = [guess for guess in everything if guess.candidate not in seen]
    first, later = rest[: grid // 2], rest[grid // 2 :]
    drawn = random.Random(gpus).sample(later, min(len(later), grid - len(first)))
    found, tried = [], [*first, *drawn]
    for number, guess in enumerate(tried, 1):
        with contextlib.suppress(ConfigError):  # what only the whole config shows
            plan = search.compile_plan(guess)
            found += [plan] if plan.fits else []
            print(f"{number} of {len(tried)}: {plan.seconds:.3f} s", file=sys.stderr, flush=True)
    other = min(found, key=lambda plan: plan.seconds, default=best)
    return (
        f"| {name} | {len(guesses)} | {took:.0f} s | {describe(best.candidate)}: {best.seconds:.3f} s | "
        f"{describe(other.candidate)}: {other.seconds:.3f} s ({len(found)} of {len(tried)} fit) | "
        f"{best.seconds / min(best.seconds, other.seconds):.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--grid", type=int, default=30, metavar="N", help="plans that are compiled besides; default 30")
    parser.add_argument("--target", default="h100")
    options = parser.parse_args()
    gpu_devices(find_target(options.target)[0], 1, 1)  # before JAX starts its backends
    print("| case | ways | search | its winner | best other plan | ratio |")
    print("| --- | ---: | ---: | --- | --- | ---: |")
    for name in options.cases or CASES:
        print(compared(name, options.target, options.grid), flush=True)


if __name__ == "__main__":
    main()
