"""Numbers that come from outside, as environment variables have them."""

import re

from jaxmnt.errors import ConfigError, printable

MOST = 2**32 - 1
"""No number of a process, host, job or step is larger anywhere."""
_SHOWN = 80


def number_of(name: str, text: str, least: int = 0, most: int = MOST) -> int:
    """The number that variable `name` holds. Raises `ConfigError` for anything but ASCII digits, and beyond bounds."""
    text = text.strip()
    if not re.fullmatch(r"[0-9]{1,20}", text):
        raise ConfigError(f"{name}: {shortened(text)!r} is not a number; correct the environment variable")
    if not least <= int(text) <= most:
        raise ConfigError(f"{name}: {text} is not between {least} and {most}; correct the environment variable")
    return int(text)


def shortened(text: str) -> str:
    """A text from outside, fit to be shown."""
    shown = printable(text[:_SHOWN])
    return shown + "…" if len(text) > _SHOWN else shown
