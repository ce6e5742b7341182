"""What is asked of the C library's malloc: huge pages, and memory given back.

On a CPU a step allocates its temporaries anew, and most of what the kernel does for it is to map them page by page:
with pages of 2 MiB it has a five-hundredth of that to do. The C library reads its variable before Python starts, so it
is for whoever starts a process to set it.
"""

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

from jaxmnt.distributed.container import kernel_text

VARIABLE, TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"

_OFFERED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that a process needs to get huge pages; empty if it has it, or if the kernel does not offer them."""
    set_before, offered = environment.get(VARIABLE, ""), kernel_text(_OFFERED)
    if TUNABLE in set_before or not offered or "[never]" in offered:
        return {}
    return {VARIABLE: ":".join(filter(None, (set_before, f"{TUNABLE}=1")))}


def missing_huge_pages() -> str | None:
    """What a process on a CPU could have been started with and was not."""
    wanted = huge_pages(os.environ)
    return " ".join(f"{name}={value}" for name, value in wanted.items()) or None


def return_free_memory() -> None:
    """Gives what was freed back to the kernel. The compiler leaves hundreds of MiB in pieces that malloc would keep.
    Does nothing with another C library than glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
