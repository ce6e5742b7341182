"""Reading a part: its documents, one at a time, whatever kind of file they are in."""

from collections.abc import Iterator

from jaxmnt.data.preparation.arrays import read_tokens
from jaxmnt.data.preparation.document import Document, Reading, Report
from jaxmnt.data.preparation.inputs import Input, Part, unreadable
from jaxmnt.data.preparation.lines import read_compressed, read_lines
from jaxmnt.data.preparation.parquet import read_parquet
from jaxmnt.data.preparation.text import read_text
from jaxmnt.errors import ConfigError, printable


def read_part(part: Part, inputs: list[Input], reading: Reading, report: Report) -> Iterator[Document]:
    """The documents of a part in order."""
    readers = {
        "text": read_text, "jsonl": read_lines, "compressed": read_compressed,
        "parquet": read_parquet, "tokens": read_tokens,
    }  # fmt: skip
    for piece in part.pieces:
        file = inputs[piece.file]
        try:
            yield from readers[file.kind](file, piece, reading, report)
        except OSError as error:
            if error.filename is None:
                raise ConfigError(f"--input: {file.shown} cannot be read: {printable(str(error))}") from error
            unreadable(error)
