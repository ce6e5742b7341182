"""Formats numbers with their units for people."""


def count(number: float) -> str:
    """Formats a number with three significant digits, such as 1.23M."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def size(number: float) -> str:
    """Formats a number of bytes in binary units, such as 1.5 GiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            value = number / 1024**power
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
    return f"{number:.0f} bytes"


def span(seconds: float) -> str:
    """Formats a time in a single unit, such as 0.5 s, 90 s, 12 min, 3.5 hours, 9 days or 6 years."""
    units = ((365 * 86400, "years"), (86400, "days"), (3600, "hours"), (60, "min"))
    length, unit = next((candidate for candidate in units if seconds >= 2 * candidate[0]), (1, "s"))
    number = seconds / length
    return f"{number:.2g} {unit}" if number < 10 else f"{number:,.0f} {unit}"


def money(amount: float | None) -> str:
    """Formats an amount of money, in the currency of the price, such as 12,345 or 3.20. An unknown amount becomes -."""
    if amount is None:
        return "-"
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:,.2f}"


def duration(seconds: float) -> str:
    """Formats seconds as 1:05 or 2:03:04."""
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def seconds_text(seconds: float) -> str:
    """Formats a short time in seconds, milliseconds or microseconds."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"
