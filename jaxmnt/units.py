"""Numbers with their units, as people read them."""


def count(number: float) -> str:
    """A number in three significant digits: 1.23M."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def size(number: float) -> str:
    """Bytes in binary units: 1.5 GiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            value = number / 1024**power
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
    return f"{number:.0f} bytes"


def span(seconds: float) -> str:
    """A time to be compared with others, in one unit: 0.5 s, 90 s, 12 min, 3.5 hours, 9 days or 6 years."""
    units = ((365 * 86400, "years"), (86400, "days"), (3600, "hours"), (60, "min"))
    length, unit = next((one for one in units if seconds >= 2 * one[0]), (1, "s"))
    number = seconds / length
    return f"{number:.2g} {unit}" if number < 10 else f"{number:,.0f} {unit}"


def money(amount: float | None) -> str:
    """12,345 or 3.20, in the currency of the price; - if it is not known."""
    return "-" if amount is None else f"{amount:,.0f}" if amount >= 100 else f"{amount:,.2f}"


def duration(seconds: float) -> str:
    """1:05 or 2:03:04."""
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def seconds_text(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.0f} µs"
