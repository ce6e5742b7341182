"""Formats the result of a search as text."""

from collections.abc import Sequence

from jaxmnt.errors import counted
from jaxmnt.plan.answer import MIN_SCALING, Answer, PlanRequest, PricedPlan, advice, knee, reasons
from jaxmnt.plan.predict import HIGH, LOW, with_range
from jaxmnt.plan.search import Search, describe
from jaxmnt.telemetry.progress import table
from jaxmnt.units import count, money, seconds_text, size, span

_MAX_PLANS = 6
"""Maximum number of plans that are shown."""


def show_answers(search: Search, answers: Sequence[Answer], request: PlanRequest, best: PricedPlan) -> str:
    """Returns the text of the answer. `best` is the winner among all numbers of GPUs."""
    data = search.config.data
    network, chip = search.network, search.chip
    batch = data.global_batch_size * data.sequence_length
    lines = [
        f"target  {chip.kind}, {network.domain} of them connected by NVLink, {network.gigabits:g} Gbit/s of "
        f"{network.fabric} per GPU beyond",
        f"goal    {count(request.tokens)} tokens, in steps of {count(batch)}",
    ]
    blocks = [_headline(best, request), "\n".join(lines)]
    if len(answers) > 1:
        blocks.append("\n".join(_gpu_table(answers)))
    best_answer = next(answer for answer in answers if answer.gpus == best.gpus)
    blocks.append("\n".join(_plan_table(best_answer)))
    reason_lines = reasons(search, best_answer)
    blocks.append(
        "\n".join(f"why     {line}" if index == 0 else f"        {line}" for index, line in enumerate(reason_lines))
    )
    failure_source = "by published failures of GPUs" if request.hours_between_failures is None else "as given"
    blocks.append("\n".join(_winner_details(best, failure_source)))
    if suggestions := advice(search, best):
        blocks.append("\n".join(f"advice  {line}" for line in suggestions))
    return "\n\n".join(blocks)


def _headline(best: PricedPlan, request: PlanRequest) -> str:
    """Returns the headline, in which time and money have the range of the predicted step time."""
    cost = "" if best.goal.cost is None else f" for {with_range(money, best.goal.cost)}"
    return (
        f"answer  {count(request.tokens)} tokens in {with_range(span, best.goal.seconds)}{cost}: "
        f"{counted(best.gpus, 'GPU', 'GPUs')}, {describe(best.plan.candidate)}"
    )


def _gpu_table(answers: Sequence[Answer]) -> list[str]:
    """Returns a table with the fastest plan for each number of GPUs."""
    rows: list[tuple[str, ...]] = [("GPUs", "step", "tokens/s/GPU", "goodput", "takes", "cost", "mesh")]
    knee_gpus = knee(answers)
    for answer in answers:
        if not answer.priced:
            rows.append((str(answer.gpus), "does not fit", "", "", "", "", ""))
            continue
        fastest = answer.priced[0]
        is_knee = answer.gpus == knee_gpus
        mark = f"  <- the knee: twice the GPUs are less than {2**MIN_SCALING:.2f} times as fast" if is_knee else ""
        rows.append((
            str(answer.gpus), seconds_text(fastest.plan.seconds), f"{fastest.tokens_per_second:,.0f}",
            f"{fastest.faults.goodput:.1%}", span(fastest.goal.seconds), money(fastest.goal.cost),
            describe(fastest.plan.candidate) + mark,
        ))  # fmt: skip
    return table(rows, right={0, 1, 2, 3, 4, 5})


def _plan_table(answer: Answer) -> list[str]:
    """Returns a table with the fastest plans for one number of GPUs."""
    rows: list[tuple[str, ...]] = [
        (
            counted(answer.gpus, "GPU", "GPUs"),
            "step",
            "range",
            "MFU",
            "memory",
            "exposed",
            "idle",
            "tokens/s/GPU",
            "takes",
            "cost",
        )
    ]
    for priced in answer.priced[:_MAX_PLANS]:
        plan, seconds = priced.plan, priced.plan.seconds
        rows.append((
            describe(plan.candidate), seconds_text(seconds),
            f"{seconds_text(LOW * seconds)} to {seconds_text(HIGH * seconds)}",
            "-" if priced.mfu is None else f"{priced.mfu:.1%}", f"{size(plan.peak)} ({plan.peak / plan.limit:.0%})",
            f"{plan.prediction.exposed / seconds:.1%}", f"{plan.prediction.bubble / seconds:.1%}",
            f"{priced.tokens_per_second:,.0f}", span(priced.goal.seconds), money(priced.goal.cost),
        ))  # fmt: skip
    return table(rows, right=set(range(1, 10)))


def _winner_details(best: PricedPlan, failure_source: str) -> list[str]:
    """Returns lines about the components of the winner's step, its failures and its settings. `failure_source` says
    where the rate of failures comes from."""
    faults = best.faults
    prediction = best.plan.prediction
    parts = ", ".join(
        f"{name} {seconds_text(seconds)}"
        for name, seconds in (
            ("work", prediction.work), ("waiting for communication", prediction.exposed),
            ("pipeline idle", prediction.bubble), ("slowdown by communication", prediction.contention),
            ("host", prediction.host),
        )
        if seconds
    )  # fmt: skip
    candidate = best.plan.candidate
    set_keys = {key: value for key, value in candidate.settings.items() if value not in (None, [], False)}
    has_pipeline = candidate.pipeline > 1
    settings = " ".join(
        f"{key}={value}" for key, value in set_keys.items() if has_pipeline or not key.startswith("pipeline.")
    )
    return [
        f"step    {parts}",
        f"fails   every {span(faults.between_seconds)} ({failure_source}); save every {span(faults.interval_seconds)} "
        f"(Young–Daly); {faults.goodput:.1%} of the time is spent on steps that count",
        f"set     {settings}",
    ]
