"""The fields of a batch. All code that reads, pads, digests, shards or compiles a batch uses this table."""

from dataclasses import dataclass

from jaxmnt.config.data import Data


@dataclass(frozen=True)
class Field:
    """Describes one array [rows, length] of a batch."""

    name: str
    dtype: str = "int32"
    filler: float = 0
    """Value of the field in rows past the end of the data."""
    axes: tuple[str, ...] = ("batch", "length")
    """Logical axes of the array."""


FIELDS = (
    Field("tokens"),
    Field("targets"),  # the token that follows each of `tokens`
    Field("weights", "float32"),  # 0 where there is no target
    Field("segments"),  # numbers of the documents in the row, from 1; 0 marks padding
    Field("positions"),  # positions in the document, from 0
)


def batch_fields(settings: Data) -> tuple[Field, ...]:
    """Returns the fields that every batch has, followed by those that `data.fields` adds."""
    return FIELDS + tuple(Field(name, dtype) for name, dtype in sorted(settings.fields.items()))
