"""What the files of checkpoints alone tell, on any machine: whether one is whole, and what two differ in."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxmnt.checkpoint.commit import Committed, open_checkpoint
from jaxmnt.checkpoint.manifest import DamagedError
from jaxmnt.checkpoint.reader import Reader
from jaxmnt.config.describe import Change, changes
from jaxmnt.config.load import parse_config
from jaxmnt.storage import Place


def verify(path: Place, run: str | None, tell: Callable[[str], None] = lambda name: None) -> Committed:
    """Reads every array of a checkpoint and compares it with its digest; `tell` hears the name of each.

    Raises `DamagedError` with everything that is wrong, and `OtherFormatError`.
    """
    checkpoint = open_checkpoint(path, run)
    reader, wrong = Reader(checkpoint), []
    for name, array in sorted(checkpoint.manifest.arrays.items()):
        tell(name)
        try:
            if reader.content(name) != array.content:
                wrong.append(f"array {name} is not what was saved: its digest is another one")
        except DamagedError as damage:
            wrong.append(str(damage))
    if wrong:
        raise DamagedError("; ".join(wrong))
    return checkpoint


@dataclass(frozen=True)
class Difference:
    """What two checkpoints differ in."""

    config: list[Change]
    only_first: list[str]
    only_second: list[str]
    other_kind: list[str]
    """Arrays of another shape or dtype."""
    other_content: list[str]
    same: list[str]


def compare(one: Committed, other: Committed) -> Difference:
    """From the manifests alone: the digest of a content is the same in any run and at any step."""
    first, second = one.manifest, other.manifest
    a, b = first.arrays, second.arrays
    both = sorted(a.keys() & b.keys())
    kind = lambda array: (array.shape, array.dtype)
    alike = [name for name in both if kind(a[name]) == kind(b[name])]
    configs = [parse_config(found.manifest.config, f"the config in {found.path}") for found in (one, other)]
    return Difference(
        changes(*configs),
        sorted(a.keys() - b.keys()),
        sorted(b.keys() - a.keys()),
        [name for name in both if name not in alike],
        [name for name in alike if a[name].content != b[name].content],
        [name for name in alike if a[name].content == b[name].content],
    )
