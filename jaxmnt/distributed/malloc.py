"""Configures the C library's malloc: huge pages, and the return of free memory to the kernel.

On a CPU, each step allocates its temporaries again, and most of the kernel's work for a step is to map them page by
page. With pages of 2 MiB there are 512 times fewer pages to map. The C library reads its variable before Python starts,
so the program that starts a process has to set it.
"""

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

from jaxmnt.distributed.container import text_in_file

VARIABLE, TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"

_KERNEL_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that gives a process huge pages. Returns no variable if it is already set, or if the kernel
    offers no huge pages."""
    current = environment.get(VARIABLE, "")
    kernel_modes = text_in_file(_KERNEL_SETTING)
    if TUNABLE in current or not kernel_modes or "[never]" in kernel_modes:
        return {}
    return {VARIABLE: ":".join(filter(None, (current, f"{TUNABLE}=1")))}


def missing_huge_pages() -> str | None:
    """Returns the setting `NAME=VALUE` that would have given this process huge pages; None if there is none."""
    variables = huge_pages(os.environ)
    return " ".join(f"{name}={value}" for name, value in variables.items()) or None


def return_free_memory() -> None:
    """Returns freed memory to the kernel, because the compiler leaves hundreds of MiB in fragments that malloc would
    keep.

    Does nothing with C libraries other than glibc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
