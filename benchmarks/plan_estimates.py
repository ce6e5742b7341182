"""What the search estimates without compiling, held against compiled programs: memory, and the time of a step.

    python benchmarks/plan_estimates.py --plans 12 --seed 7    compile 12 plans drawn at random, and compare
    python benchmarks/plan_estimates.py --plans 100 --add      the same, and add them to the data of the fit
    python benchmarks/plan_estimates.py                        compare with the data of the fit
    python benchmarks/plan_estimates.py --again                compile the data of the fit anew, with another program
    python benchmarks/plan_estimates.py --fit                  fit the multiples of `plan/multiples.toml` to that data

Needs the extra `plan`; no GPU. A plan takes some ten seconds on two cores.
"""

import argparse
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxmnt.config.load import load_config
from jaxmnt.errors import ConfigError
from jaxmnt.models.contract import AttentionShape, LayerCosts, Product
from jaxmnt.plan.candidates import CHUNKS, REMATS, Candidate
from jaxmnt.plan.chips import find_target
from jaxmnt.plan.memory import KINDS, MULTIPLES, Multiples, estimate_memory, kind_of, multiples_of
from jaxmnt.plan.rates import rates_of
from jaxmnt.plan.targets import gpu_devices
from jaxmnt.plan.workload import ModelShape, Scheme

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(__file__).with_name("compiled_plans.jsonl")
MODELS = (
    "llama3.2-1b", "llama3.2-3b", "llama3.1-8b", "mistral-7b-v0.3", "olmo2-13b", "qwen3-14b", "qwen3-32b",
    "llama3.1-70b",
)  # fmt: skip
TARGETS = ("h100", "h200")
_LARGE = ("qwen3-32b", "llama3.1-70b")
_MEASURES = {"kept_of_row": "row_residuals", "kept_at_most": "row_residuals_without_remat"}
"""Arguments of `estimate_memory` after shape and scheme, in its order: key of a record → field of `Guess`."""


def drawn(seed: int) -> Iterator[tuple[str, str, int, Candidate]]:
    """(model, target, length, candidate), without end. Some of them do not divide."""
    rng = random.Random(seed)
    while True:
        name = rng.choice(MODELS)
        hosts = rng.choice([2, 4, 8, 16] if name in _LARGE else [1, 2, 4, 8, 16])
        model, pipeline = rng.choice([1, 1, 1, 2, 4, 8]), rng.choice([1, 1, 1, 2, 4, 8])
        rest = 8 * hosts // (model * pipeline)
        if not rest:
            continue
        fsdp = rng.choice([size for size in range(1, rest + 1) if rest % size == 0])
        chunks = rng.choice(CHUNKS[:2]) if pipeline > 1 else 1
        microbatches = pipeline * rng.choice([2, 4]) if pipeline > 1 else rng.choice([1, 2, 4])
        zero = rng.choice([3, 3, 3, 3, 2, 1]) if fsdp > 1 else 3
        one = Candidate(
            rest // fsdp, pipeline, fsdp, model, rng.choice([1, 1, 2, 4]), microbatches, chunks, rng.choice(REMATS),
            zero,
        )  # fmt: skip
        yield name, rng.choice(TARGETS), rng.choice([2048, 4096, 8192]), one


def compiled(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Of so many of 4 GiB and more that about fit: what is needed to estimate them, and what the compiler says."""
    done = 0
    for name, target, length, one in drawn(seed):
        if done == count:
            return
        record = _compiled(name, target, length, one)
        if record is not None:
            done += 1
            yield record


def again(records: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same plans, by the program as it is now. Those that no longer are of 4 GiB, or fit, are left out."""
    for record in records:
        scheme = scheme_of(record)
        one = Candidate(
            scheme.data, scheme.pipeline, scheme.fsdp, scheme.model, scheme.rows, scheme.microbatches, scheme.chunks,
            scheme.remat, scheme.zero,
        )  # fmt: skip
        if new := _compiled(record["model"], record["target"], scheme.length, one):
            yield new


def _compiled(name: str, target: str, length: int, one: Candidate) -> dict[str, Any] | None:
    gpu_devices(find_target("h100")[0], 1, 1)
    from jaxmnt.plan.search import Search

    chip, network = find_target(target)
    batch = one.rows * one.microbatches * one.data * one.fsdp
    overrides = [f"model.preset={name}", f"data.sequence_length={length}", f"data.global_batch_size={batch}"]
    config = load_config(ROOT / "configs" / "llama-8b.yaml", overrides)
    search = Search(config, chip, network, rates_of(chip, network))
    guess = search.guess(one)
    if guess is None or guess.memory.peak > 1.1 * search.limit or guess.memory.peak < 2**32:
        return None
    try:
        plan = search.compile_plan(guess)
    except ConfigError:  # what only the whole config shows
        return None
    shape, kv_heads = search.shape, config.model.num_kv_heads
    layers = [
        (count, (layer.products, layer.attention.heads, kv_heads, layer.attention.head_dim, layer.attention.window))
        for count, layer in shape.layers
    ]
    return {
        "model": name, "target": target, "scheme": vars(guess.scheme),
        "shape": [layers, shape.hidden, shape.vocab, shape.tied, shape.other_parameters],
        **{key: getattr(guess, name) for key, name in _MEASURES.items()}, "peak": plan.peak,
        "estimated_peak": round(guess.memory.peak), "seconds": plan.seconds, "estimated_seconds": guess.seconds,
    }  # fmt: skip


def shape_of(record: dict[str, Any]) -> ModelShape:
    layers, hidden, vocab, tied, others = record["shape"]
    kinds = tuple(
        (count, LayerCosts(tuple(Product(*product) for product in products), AttentionShape(heads, head_dim, window)))
        for count, (products, heads, _, head_dim, window) in layers
    )
    return ModelShape(kinds, hidden, vocab, tied, others)


def scheme_of(record: dict[str, Any]) -> Scheme:
    """Older records have the slots beside the scheme, and `kept` for the residuals."""
    names = {"kept": "residual_bytes"}
    known = {names.get(key, key): value for key, value in record["scheme"].items()}
    return Scheme(**({"slots": record["slots"]} if "slots" in record else {}) | known)


def peak_of(record: dict[str, Any], multiples: Multiples | None = None) -> float:
    """Estimated, in bytes."""
    memory = estimate_memory(
        shape_of(record), scheme_of(record), *map(record.__getitem__, _MEASURES), multiples=multiples
    )
    return memory.peak


def fitted(records: Sequence[dict[str, Any]], start: Multiples) -> Multiples:
    """Of least mean error of the peak, one multiple at a time, from several starts."""
    known = [(record, shape_of(record), scheme_of(record)) for record in records]

    def loss(tried: Multiples) -> float:
        errors = (
            estimate_memory(shape, scheme, *map(record.__getitem__, _MEASURES), multiples=tried).peak / record["peak"]
            - 1
            for record, shape, scheme in known
        )
        return statistics.fmean(min(abs(error), 0.1) for error in errors)

    def descended(best: Multiples) -> tuple[float, Multiples]:
        least = loss(best)
        for step in (0.5, 0.2, 0.1, 0.05):
            moved = True
            while moved:
                moved = False
                for name, sign in ((name, sign) for name in best for sign in (-1, 1)):
                    value = best[name]
                    tried = {**best, name: max(0.0, value + sign * step * max(value, 0.3))}
                    if (new := loss(tried)) < least - 1e-6:
                        best, least, moved = tried, new, True
        for name in best:  # what nothing depends on
            if loss(tried := {**best, name: 0.0}) <= least:
                best = tried
        return least, best

    rng = random.Random(0)
    starts = [
        start,
        *({name: value * rng.uniform(0, 2) + rng.uniform(0, 0.5) for name, value in start.items()} for _ in range(60)),
    ]
    return min(map(descended, starts), key=lambda found: (found[0], *found[1].values()))[1]


def told(record: dict[str, Any]) -> str:
    scheme = scheme_of(record)
    mesh = " ".join(
        f"{axis} {getattr(scheme, axis)}" for axis in ("data", "pipeline", "fsdp", "model") if getattr(scheme, axis) > 1
    )
    estimated = peak_of(record) / 2**30
    peak, ratio = record["peak"] / 2**30, estimated * 2**30 / record["peak"]
    time = record["estimated_seconds"] / record["seconds"]
    return (
        f"{ratio:6.3f}  {estimated:6.1f} of {peak:6.1f} GiB   time {time:5.2f} of {record['seconds']:7.3f} s   "
        f"{record['model']} on {record['target']}: {mesh or 'one device'}, {scheme.length} × {scheme.rows} × "
        f"{scheme.microbatches}, remat {scheme.remat}, ZeRO {scheme.zero}, {scheme.chunks} chunks"
    )


def summary(records: Sequence[dict[str, Any]]) -> str:
    memory = [abs(peak_of(record) / record["peak"] - 1) for record in records]
    time = [abs(record["estimated_seconds"] / record["seconds"] - 1) for record in records]
    within = sum(error <= 0.03 for error in memory)
    return (
        f"{len(records)} plans: memory {100 * statistics.median(memory):.1f} % off by the median, "
        f"{100 * max(memory):.1f} % at most, {within} within 3 %; time {100 * statistics.median(time):.1f} % off by "
        f"the median, {100 * max(time):.1f} % at most"
    )


def _shown(records: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """As they are read from the data again, each with its line."""
    for record in records:
        read = json.loads(json.dumps(record))
        print(told(read), flush=True)
        yield read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, metavar="N", help="compile so many, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the draw; default 0")
    parser.add_argument("--add", action="store_true", help="add them to the data of the fit")
    parser.add_argument("--again", action="store_true", help="compile the data of the fit anew")
    parser.add_argument("--fit", action="store_true", help="fit the multiples to the data")
    options = parser.parse_args()
    if options.plans is not None:
        records = []
        for record in _shown(compiled(options.plans, options.seed)):
            records.append(record)
            if options.add:
                with DATA.open("a") as file:
                    file.write(json.dumps(record) + "\n")
        print(summary(records))
        return
    records = [json.loads(line) for line in DATA.read_text().splitlines()]
    if options.again:
        new = list(_shown(again(records)))
        DATA.write_text("".join(json.dumps(record) + "\n" for record in new))
        print(summary(new))
        return
    if not options.fit:
        print(*map(told, records), summary(records), sep="\n")
        return
    by_kind = defaultdict(list)
    for record in records:
        by_kind[kind_of(scheme_of(record))].append(record)
    best = {}
    for kind in KINDS:
        best[kind] = fitted(by_kind[kind], multiples_of(kind))
        errors = [abs(peak_of(record, best[kind]) / record["peak"] - 1) for record in by_kind[kind]]
        print(f"{kind}: {len(errors)} plans, error {statistics.fmean(errors):.4f}, at most {max(errors):.3f}")
    for name in MULTIPLES:
        print(f"{name} = [{', '.join(f'{best[kind][name]:.2f}' for kind in KINDS)}]")


if __name__ == "__main__":
    main()
