"""Formats the result of a search as text."""

from collections.abc import Sequence

from jaxmnt.errors import counted
from jaxmnt.plan.answer import Answer, PlanRequest, Priced, advice, knee, reasons
from jaxmnt.plan.predict import HIGH, LOW, with_range
from jaxmnt.plan.search import Search, describe
from jaxmnt.telemetry.progress import table
from jaxmnt.units import count, money, seconds_text, size, span

_SHOWN = 6


def show_answers(search: Search, answers: Sequence[Answer], request: PlanRequest, best: Priced) -> str:
    """Returns the whole answer; `best` is the winner among all numbers of GPUs."""
    data = search.config.data
    network, chip = search.network, search.chip
    batch = data.global_batch_size * data.sequence_length
    lines = [
        f"target  {chip.kind}, {network.domain} that reach each other by NVLink, {network.gigabits:g} Gbit/s of "
        f"{network.fabric} a GPU beyond",
        f"goal    {count(request.tokens)} tokens, in steps of {count(batch)}",
    ]
    blocks = [_answer(best, request), "\n".join(lines)]
    if len(answers) > 1:
        blocks.append("\n".join(_by_gpus(answers)))
    own = next(answer for answer in answers if answer.gpus == best.gpus)
    blocks.append("\n".join(_ranked(own)))
    blocks.append(
        "\n".join(
            f"why     {line}" if place == 0 else f"        {line}" for place, line in enumerate(reasons(search, own))
        )
    )
    known = "by published failures of GPUs" if request.hours_between_failures is None else "as given"
    blocks.append("\n".join(_of_the_best(best, known)))
    if told := advice(search, best):
        blocks.append("\n".join(f"advice  {line}" for line in told))
    return "\n\n".join(blocks)


def _answer(best: Priced, request: PlanRequest) -> str:
    """Returns the headline: time and money, each with the range of the predicted step time."""
    cost = "" if best.goal.cost is None else f" for {with_range(money, best.goal.cost)}"
    return (
        f"answer  {count(request.tokens)} tokens in {with_range(span, best.goal.seconds)}{cost}: "
        f"{counted(best.gpus, 'GPU', 'GPUs')}, {describe(best.plan.candidate)}"
    )


def _by_gpus(answers: Sequence[Answer]) -> list[str]:
    rows: list[tuple[str, ...]] = [("GPUs", "step", "tokens/s/GPU", "goodput", "takes", "cost", "mesh")]
    turn = knee(answers)
    for answer in answers:
        if not answer.priced:
            rows.append((str(answer.gpus), "does not fit", "", "", "", "", ""))
            continue
        one = answer.priced[0]
        mark = "  <- the knee: more GPUs hold less than 80 % of what they promise" if answer.gpus == turn else ""
        rows.append((
            str(answer.gpus), seconds_text(one.plan.seconds), f"{one.tokens_per_second:,.0f}",
            f"{one.faults.goodput:.1%}", span(one.goal.seconds), money(one.goal.cost),
            describe(one.plan.candidate) + mark,
        ))  # fmt: skip
    return table(rows, right={0, 1, 2, 3, 4, 5})


def _ranked(answer: Answer) -> list[str]:
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
    for one in answer.priced[:_SHOWN]:
        plan, seconds = one.plan, one.plan.seconds
        rows.append((
            describe(plan.candidate), seconds_text(seconds),
            f"{seconds_text(LOW * seconds)} to {seconds_text(HIGH * seconds)}",
            "-" if one.mfu is None else f"{one.mfu:.1%}", f"{size(plan.peak)} ({plan.peak / plan.limit:.0%})",
            f"{plan.prediction.exposed / seconds:.1%}", f"{plan.prediction.bubble / seconds:.1%}",
            f"{one.tokens_per_second:,.0f}", span(one.goal.seconds), money(one.goal.cost),
        ))  # fmt: skip
    return table(rows, right=set(range(1, 10)))


def _of_the_best(best: Priced, known: str) -> list[str]:
    """Returns the winner's step breakdown, failures and settings. `failure_source` says where the failure rate comes
    from."""
    faults, found = best.faults, best.plan.prediction
    parts = ", ".join(
        f"{name} {seconds_text(value)}"
        for name, value in (
            ("work", found.work), ("waiting for communication", found.exposed), ("pipeline idle", found.bubble),
            ("slowed beside communication", found.contention), ("host", found.host),
        )
        if value
    )  # fmt: skip
    one = best.plan.candidate
    keys = {key: value for key, value in one.settings.items() if value not in (None, [], False)}
    settings = " ".join(
        f"{key}={value}" for key, value in keys.items() if one.pipeline > 1 or not key.startswith("pipeline.")
    )
    return [
        f"step    {parts}",
        f"fails   every {span(faults.between_seconds)} ({known}); save every {span(faults.interval_seconds)} "
        f"(Young–Daly); {faults.goodput:.1%} of the time goes into steps",
        f"set     {settings}",
    ]
