"""The estimate that needs no compile, held against published runs of other frameworks; and the fit of its rates.

    python benchmarks/published.py                           print the table of errors by source
    python benchmarks/published.py --rows SOURCE             print the rows of sources with this in their name
    python benchmarks/published.py --fit                     fit the rates to all rows, and print them
    python benchmarks/published.py --write docs/planning.md  put the table between that file's markers
    python benchmarks/published.py --data FILE               take rows from another file of the same columns

Each source's convention is set first: rows that state TFLOP/s alone are turned into tokens/s by it. What a framework
does otherwise is in `other_frameworks.py`, from its documents, and not fitted. No row
has a constant of its own.
"""

import argparse
import csv
import itertools
import math
import re
import statistics
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from other_frameworks import OtherScheme, OtherStep, decoder, preset, software

from jaxmnt.plan import estimate as estimates
from jaxmnt.plan import rates as rating
from jaxmnt.plan.chips import CHIPS, Chip
from jaxmnt.plan.workload import ModelShape

DATA = Path(__file__).with_name("published_runs.csv")
BEGIN, END = "<!-- table: benchmarks/published.py -->", "<!-- end of table -->"

LIMITED = replace(CHIPS["h100"], kind="NVIDIA H100", bandwidth=2_400_000_000_000, power=500 / 700)
"""torchtitan's: 96 GB of HBM2e, and 500 W."""


@dataclass(frozen=True)
class Row:
    source: str
    publisher: str
    label: str
    model: ModelShape
    scheme: OtherScheme
    chip: Chip
    software: str
    tokens_per_second: float
    """Of a GPU, as published."""

    @property
    def has_experts(self) -> bool:
        return any(layer.expert_parameters for _, layer in self.model.layers)


class OmittedError(ValueError):
    """A row that is left out, and why."""


def rows_of(path: Path) -> tuple[list[Row], Counter[str]]:
    """The rows that the estimate can be held against, and how many are left out, by reason."""
    found, left = [], Counter[str]()
    with path.open() as file:
        for line in csv.DictReader(line for line in file if not line.startswith("#")):
            try:
                found.append(_row(line))
            except OmittedError as reason:
                left[str(reason)] += 1
    return found, left


_PRESETS = {"Qwen3_30B_a3B": "qwen3-30b-a3b", "Qwen3_235B_a22B": "qwen3-235b-a22b"}
"""Mixtures of experts whose shapes are jaxmnt's presets, by the beginning of their name."""
_EXPERTS = ("MoE", "a3B", "a22B", "DeepSeek", "OSS", "Kimi", "Nemotron_3", "Mixtral")
_VOCABULARY = {"GPT3": 51200, "Nemotron": 256000}


def _row(line: Mapping[str, str]) -> Row:
    source, notes, name = line["source"], line["notes"], line["model"]
    number = lambda key, default=None: int(float(line[key])) if line[key] else default
    mixture = next((released for key, released in _PRESETS.items() if name.startswith(key)), None)
    if mixture is None and any(word in name or word in notes for word in _EXPERTS):
        raise OmittedError("other experts")
    if mixture is None and (not line["layers"] or not line["hidden"]):
        raise OmittedError("shapes are not published")
    if not line["tp"] or not line["num_gpus"]:
        raise OmittedError("the mesh is not published")
    float8 = "fp8" in line["precision"]
    if line["precision"] in ("mxfp8", "fp8-mx", "nvfp4", "fp8-rowwise") and mixture is None:
        raise OmittedError(f"precision {line['precision']} is not supported")
    chip = _chip(line["gpu"])
    model = _shape(line) if mixture is None else preset(mixture)
    parts = {axis: number(key, 1) for axis, key in (("model", "tp"), ("pipeline", "pp"), ("context", "cp"))}
    replicas = number("num_gpus") // math.prod(parts.values())
    # Tensor parallelism divides experts as well, so `expert` is the rest of the group that shares them.
    group = re.search(r"EP=(\d+)", notes) if mixture else None
    expert = int(group.group(1)) // parts["model"] if group else 1
    batch, rows = number("global_batch_seqs"), number("micro_batch", 1)
    if not batch or batch < replicas * rows or replicas < 1:
        raise OmittedError("the batch does not divide among the GPUs")
    if "Interleaved" in notes and not line["vpp"]:
        raise OmittedError("the chunks of a stage are not published")
    kind, zero, remat = _framework(source, notes, line["remat"])
    chunks, microbatches = number("vpp", 1) or 1, batch // (replicas * rows)
    scheme = OtherScheme(
        length=number("seq_len"), rows=rows, microbatches=microbatches, fsdp=replicas // expert, zero=zero,
        chunks=chunks, expert=expert,
        idle=(parts["pipeline"] - 1) / (microbatches * chunks), ticks=chunks * microbatches, remat=remat,
        dtype="float8" if float8 else "bfloat16", **parts,
    )  # fmt: skip
    rate = float(line["tokens_per_s_per_gpu"]) if line["tokens_per_s_per_gpu"] else None
    if rate is None:
        rate = _tokens_per_second(source, float(line["tflops_per_gpu"]), model, scheme)
    mesh = " ".join(f"{key}{line[key]}" for key in ("tp", "pp", "cp", "vpp") if line[key] not in ("", "1"))
    mesh += f" ep{group.group(1)}" if group else ""
    label = f"{name}, {scheme.length}, {line['gpu']} × {line['num_gpus']}, {mesh or 'fsdp'}, {rows} rows"
    return Row(source, _publisher(source), label, model, scheme, chip, kind, rate)


def _shape(line: Mapping[str, str]) -> ModelShape:
    """The shape of a dense decoder."""
    number = lambda key, default=None: int(float(line[key])) if line[key] else default
    name, heads = line["model"], number("heads")
    vocab = number("vocab") or next((size for key, size in _VOCABULARY.items() if key in name), None)
    if vocab is None:
        raise OmittedError("shapes are not published")
    gated = any(family in name.lower() for family in ("llama", "qwen", "mistral", "gemma"))
    return decoder(
        number("layers"), number("hidden"), heads, number("kv_heads", heads), number("ffn"), vocab,
        gated=gated, tied=not gated,
    )  # fmt: skip


def _chip(name: str) -> Chip:
    if "500W" in name:
        return LIMITED
    if "A100" in name:
        return CHIPS["a100-40gb" if "40GB" in name else "a100"]
    return CHIPS[next(one for one in ("gb300", "gb200", "b300", "b200", "h200", "h100") if one in name.lower())]


def _framework(source: str, notes: str, remat: str) -> tuple[str, int, str]:
    """(key of `software`, ZeRO stage, what is computed again)."""
    remat = {
        "selective(op)": "half_the_products", "selective(layer)": "half_the_layers", "full": "full", "": "none",
    }.get(remat, "none")  # fmt: skip
    sharded = 3 if "FSDP=" in notes and "FSDP=0" not in notes else 1
    if "orch" in source and "itan" in source:
        compiled = "torchtitan" + ", compiled" * ("compile" in notes or "asyncTP" in source)
        return compiled + ", async" * (compiled != "torchtitan" and "AsyncTP" in notes), 3, remat
    if "foundry" in source:
        return "llm-foundry", 3, remat
    if "2104.04473" in source:
        return ("DeepSpeed 2021", 3, "full") if "ZeRO-3" in source else ("Megatron 2021", 0, "full")
    if "AutoModel" in source:
        return "torchtitan, compiled", 3, remat
    if "NeMo" in source or "Megatron" in source:
        return "Megatron" + ", 2024" * ("24.03" in source), sharded, remat
    if "axtext" in source.lower():
        return "MaxText", 3, "none"
    raise OmittedError("the framework is not described")


def _publisher(source: str) -> str:
    """Whose software it is: what is fitted without one has seen none of it."""
    names = {
        "orchtitan": "torchtitan", "orchTitan": "torchtitan", "foundry": "llm-foundry", "2104": "Megatron 2021",
        "AutoModel": "AutoModel", "NeMo docs": "NeMo", "NeMo 24": "NeMo", "Bridge": "Megatron-Bridge",
        "axtext": "MaxText", "axText": "MaxText",
    }  # fmt: skip
    return next((name for key, name in names.items() if key in source), source)


def _tokens_per_second(source: str, tflops: float, model: ModelShape, scheme: OtherScheme) -> float:
    """Of a GPU, from its TFLOP/s in the source's convention."""
    [(count, layer)] = model.layers
    square = 12 * count * model.hidden * scheme.length
    if "2104.04473" in source:  # hardware FLOPs: forward twice
        h, s, v = model.hidden, scheme.length, model.vocab
        return tflops * 1e12 / (96 * count * h * h * (1 + s / (6 * h) + v / (16 * count * h)))
    multiplying = 6 * (count * layer.parameters + model.vocab * model.hidden)
    causal = "Bridge" in source or "AutoModel" in source
    return tflops * 1e12 / (multiplying + (square / 2 if causal else square))


# The rates as one tuple of numbers that can be fitted.

Constants = dict[str, float]


PRIOR: Constants = {
    "ampere.products": 0.84, "ampere.attention": 0.60,
    "hopper.products": 0.72, "hopper.float8": 0.66, "hopper.attention": 0.55,
    "blackwell.products": 0.76, "blackwell.float8": 0.68, "blackwell.attention": 0.55,
    "depth": 400.0, "contention": 0.10,
}  # fmt: skip
"""What would be said without any published run: rates that libraries measure of single kernels."""
TRUST = 0.2
"""How much the fit minds a constant that leaves its prior, in loss for each unit of its logarithm."""


def standing() -> Constants:
    """As they are in the code."""
    found = {
        name: getattr(rating.ACHIEVED_SHARES[name.split(".")[0]], name.split(".")[1]) for name in PRIOR if "." in name
    }
    return found | {"depth": rating.HALF_DEPTH, "contention": estimates.CONTENTION}


def predicted(row: Row, constants: Constants) -> float:
    """Tokens per second of a GPU."""
    generation = row.chip.generation
    old = rating.ACHIEVED_SHARES[generation]
    of = lambda field: constants.get(f"{generation}.{field}", getattr(old, field))
    attained = old._replace(products=of("products"), float8=of("float8"), attention=of("attention"))
    rates = replace(rating.rates_of(row.chip, attained=attained), depth=constants["depth"])
    found = OtherStep(row.model, row.scheme, rates, row.chip.domain, software(row.software, generation)).estimate()
    seconds = found.seconds + (constants["contention"] / estimates.CONTENTION - 1) * found.contention
    return row.scheme.step_tokens / seconds / row.scheme.devices


def loss(rows: Sequence[Row], constants: Constants) -> float:
    """Absolute errors of logarithms, a publisher's mean weighed by the root of how many rows it has."""
    errors = defaultdict(list)
    for row in rows:
        errors[row.publisher].append(abs(math.log(predicted(row, constants) / row.tokens_per_second)))
    weights = {name: math.sqrt(len(found)) for name, found in errors.items()}
    weighted = sum(weights[name] * statistics.fmean(min(one, 0.5) for one in found) for name, found in errors.items())
    return weighted / sum(weights.values())


def fitted(rows: Sequence[Row]) -> Constants:
    """Constants of least loss for dense models, found one at a time until none helps. What no row needs stays at its
    prior."""
    rows = [row for row in rows if not row.has_experts]
    mind = lambda tried: TRUST * statistics.fmean(abs(math.log(tried[name] / PRIOR[name])) for name in PRIOR)
    best, least = PRIOR, loss(rows, PRIOR)
    for step in (0.2, 0.1, 0.05, 0.02):
        moved = True
        while moved:
            moved = False
            for name, factor in itertools.product(best, (1 - step, 1 + step)):
                tried = best | {name: best[name] * factor}
                if not _plausible(name, tried[name]):
                    continue
                if (new := loss(rows, tried) + mind(tried)) < least - 1e-5:
                    best, least, moved = tried, new, True
    return best


def _plausible(name: str, value: float) -> bool:
    """Rates below the peak, as others measure them; contention of a size that hardware allows."""
    low, high = {"depth": (50, 1000), "contention": (0.02, 0.5)}.get(name, (0.3, 0.95))
    return low <= value <= high


def without_publisher(rows: Sequence[Row]) -> dict[str, Constants]:
    """By publisher: constants that were fitted to all others' rows."""
    return {name: fitted([row for row in rows if row.publisher != name]) for name in publishers(rows)}


def publishers(rows: Sequence[Row]) -> list[str]:
    return sorted({row.publisher for row in rows})


def kendall(pairs: Sequence[tuple[float, float]], apart: float = 0.0) -> float | None:
    """Kendall's tau of the ranks by estimate and as published; pairs whose published figures are within `apart` of each
    other are none. None without pairs."""
    signs = [
        math.copysign(1, (a[0] - b[0]) * (a[1] - b[1]))
        for a, b in itertools.combinations(pairs, 2)
        if a[0] != b[0] and a[1] != b[1] and abs(math.log(a[1] / b[1])) > apart
    ]
    return sum(signs) / len(signs) if signs else None


NOISE = 0.03
"""As much as a run differs from itself."""


def ranked(rows: Sequence[Row], of: Callable[[Row], float]) -> list[float]:
    """Kendall's tau of each group of runs of one source that differ in nothing but the mesh, the batch and the way in
    which they are executed, and by more than noise."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.source, row.model, row.scheme.length, row.chip.kind, row.scheme.dtype].append(row)
    found = (kendall([(of(row), row.tokens_per_second) for row in group], NOISE) for group in groups.values())
    return [tau for tau in found if tau is not None]


def halves(ratios: Sequence[float]) -> Iterator[float]:
    """Errors of each half of a source's rows, with one factor fitted on the other half: its median."""
    for mine, other in ((ratios[::2], ratios[1::2]), (ratios[1::2], ratios[::2])):
        if mine and other:
            factor = statistics.median(other)
            yield from (abs(ratio / factor - 1) for ratio in mine)


def table(rows: Sequence[Row], left: Counter[str], unseen: Mapping[str, Constants]) -> str:
    constants = standing()
    by_source = defaultdict(list)
    for row in rows:
        by_source[row.source + ", mixtures of experts" * row.has_experts].append(row)
    lines = [
        "| source | rows | estimate / published, median | error | error unseen | error with its factor | tau |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    told: dict[str, list[float]] = defaultdict(list)
    for source, own in by_source.items():
        ratios = [predicted(row, constants) / row.tokens_per_second for row in own]
        blind = [abs(predicted(row, unseen[row.publisher]) / row.tokens_per_second - 1) for row in own]
        halved = list(halves(ratios)) if len(own) >= 4 else []
        kind = "mixed " if own[0].has_experts else ""
        told[f"{kind}error"] += [abs(ratio - 1) for ratio in ratios]
        told[f"{kind}unseen"] += blind
        told[f"{kind}factor"] += halved
        tau = kendall([(predicted(row, constants), row.tokens_per_second) for row in own])
        cells = (
            source.replace("|", "/"), str(len(own)), f"{statistics.median(ratios):.2f}",
            percent(statistics.median(abs(ratio - 1) for ratio in ratios)), percent(statistics.median(blind)),
            percent(statistics.median(halved)) if halved else "-", "-" if tau is None else f"{tau:.2f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    error, blind, factor = told["error"], told["unseen"], told["factor"]
    within = lambda errors: percent(sum(one <= 0.3 for one in errors) / len(errors))
    mixed = told["mixed error"]
    dense = [row for row in rows if not row.has_experts]
    taus = ranked(dense, lambda row: predicted(row, constants))
    mixtures = mixed and [
        f"All {len(mixed)} rows of mixtures of experts, to which nothing is fitted: median error "
        f"{percent(statistics.median(mixed))}, {within(mixed)} of them within 30 %.",
        "",
    ]
    lines += [
        "",
        f"All {len(dense)} rows of dense models: median error {percent(statistics.median(error))}, {within(error)} of "
        "them within 30 %. "
        "With constants that were fitted without the rows of the publisher, the median error is "
        f"{percent(statistics.median(blind))}, with {within(blind)} within 30 %. "
        "With one factor per source, fitted on one half of its rows and compared with the other: "
        f"{percent(statistics.median(factor))}. Kendall's tau is {statistics.fmean(taus):.2f} on average over "
        f"{len(taus)} groups. The runs of a group share source and model, and differ in mesh, batch or execution; "
        f"pairs whose published speeds are within {percent(NOISE)} are not ranked.",
        "",
        *mixtures,
        _text_of_divided_rows(rows, constants),
        "",
        "Rows that are left out, by reason: "
        + "; ".join(f"{reason} ({count})" for reason, count in sorted(left.items()))
        + ".",
    ]
    return "\n".join(line if line.startswith("|") else textwrap.fill(line, 124) for line in lines)


def _text_of_divided_rows(rows: Sequence[Row], constants: Constants) -> str:
    """What the errors are of runs in which devices share rows, by the length of rows."""
    errors = defaultdict(list)
    for row in rows:
        if row.scheme.context > 1:
            errors[row.scheme.length].append(abs(predicted(row, constants) / row.tokens_per_second - 1))
    if not errors:
        return "In none of them, devices share rows."
    everything = [error for of_length in errors.values() for error in of_length]
    by_length = "; ".join(
        f"{length:,} tokens {percent(statistics.median(of_length))} ({len(of_length)})"
        for length, of_length in sorted(errors.items())
    )
    return (
        f"In {len(everything)} of the rows, devices share rows of tokens (context parallelism): median error "
        f"{percent(statistics.median(everything))}. By the length of these, with the number of rows: {by_length}."
    )


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, metavar="FILE", help="rows (default: those beside this)")
    parser.add_argument("--rows", metavar="SOURCE", help="print each row of sources with this in their name")
    parser.add_argument("--fit", action="store_true", help="fit the constants to all rows")
    parser.add_argument("--write", type=Path, metavar="FILE", help="Markdown file with the markers")
    options = parser.parse_args()
    rows, left = rows_of(options.data)
    constants = standing()
    if options.rows is not None:
        for row in (row for row in rows if options.rows in row.source):
            found = predicted(row, constants)
            print(f"{found / row.tokens_per_second:.3f}  {found:9.0f} {row.tokens_per_second:9.0f}  {row.label}")
        return
    if options.fit:
        best = fitted(rows)
        print(f"loss {loss(rows, constants):.4f} before, {loss(rows, best):.4f} after")
        for name, value in best.items():
            print(f"{name:24s} {constants[name]:.4g} -> {value:.4g}")
        return
    fit_to, _ = rows_of(DATA)
    text = table(rows, left, without_publisher(fit_to))
    print(text)
    if options.write is not None:
        before, rest = options.write.read_text().split(BEGIN)
        after = rest.split(END, 1)[1]
        options.write.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
