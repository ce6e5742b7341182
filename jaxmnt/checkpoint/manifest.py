"""The sealed manifest of a checkpoint: its run, its step and the arrays and files that it must contain.

`jaxmnt.json` is written last, so it is also the commit marker. Its seal is a SHA-256 of its content. A manifest of an
unknown format version is refused before the rest of it is interpreted.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, field_validator

from jaxmnt import __version__
from jaxmnt.checkpoint import digest
from jaxmnt.errors import ConfigError, UserError, printable
from jaxmnt.storage import StoragePath, json_digest, publish
from jaxmnt.storage import read as read_file
from jaxmnt.strict_json import finite, json_text

MANIFEST_FILE = "jaxmnt.json"
FORMAT_VERSION = 2
_BRANCH_VERSION = 3
"""Format version of a branch's checkpoints, whose lineage contains row numbers of the data; version 2 cannot
represent these."""
_BASE_VERSION = 4
"""Format version of checkpoints of a run with adapters, which name the frozen parameters of the run."""
_VERSIONS = (FORMAT_VERSION, _BRANCH_VERSION, _BASE_VERSION)


class DamagedError(UserError):
    """Raised for a checkpoint that differs from what was committed. The message says what is damaged, and how."""


class OtherFormatError(ConfigError):
    """Raised for a checkpoint of another format version, which must neither be read nor set aside."""


@dataclass(frozen=True)
class Array:
    """The description of an array. The manifest has it under the array's name, PART/KEY/KEY…"""

    shape: tuple[int, ...]
    dtype: str
    content: str
    """Digest of the elements and their positions, independent of run and step; see `digest.py`."""

    @property
    def bytes(self) -> int:
        return _ELEMENT_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class Base:
    """The frozen parameters of a run with adapters, which its checkpoints do not contain."""

    source: str
    """The model that they are read from: hf:FOLDER, or the directory of a run's checkpoint."""
    arrays: dict[str, Array]
    """The description of each, under the name that it would have in a checkpoint. Its dtype is the dtype in which it
    was read."""


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint, which is stored with it."""

    run: str
    """The run's id."""
    step: int
    arrays: dict[str, Array]
    config: dict[str, Any]
    """The run's resolved config when the checkpoint was saved."""
    tokens: int
    """Number of targets that the run has trained on, without padding."""
    data: dict[str, str]
    """Digest of each data source, by name."""
    loss: float | None
    """Held-out loss at this step; None if it was not evaluated."""
    lineage: list[dict[str, Any]]
    """The runs and steps that this run was forked from, newest first."""
    time: float = 0.0
    """Time of the commit, in Unix seconds."""
    jaxmnt: str = __version__
    libraries: dict[str, str] = field(default_factory=dict)
    base: Base | None = None
    """The frozen parameters; None if the checkpoint has all parameters."""

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays.values())

    @property
    def eval_tokens(self) -> Any:
        """The limit on the tokens that `loss` is averaged over, from the run's config; None means all held-out data."""
        return self.config.get("train", {}).get("eval_tokens")

    @property
    def config_digest(self) -> str:
        return json_digest(self.config)

    def bound_digest(self, name: str, content: str | None = None) -> str:
        """Returns a digest that binds an array's content to its name, shape and dtype, and to the step and the run.

        `content` is the digest of the content; None means the one in this manifest.
        """
        array = self.arrays[name]
        return digest.bound(content or array.content, self.run, self.step, name, array.shape, array.dtype)


def write(directory: StoragePath, manifest: Manifest, files: dict[str, list[Any]]) -> None:
    """Commits a checkpoint by publishing its manifest.

    `files` has `[size in bytes, SHA-256 or None]` of each file, by the file's path in `directory`.
    """
    version = _BRANCH_VERSION if any("row" in parent for parent in manifest.lineage) else FORMAT_VERSION
    version = version if manifest.base is None else _BASE_VERSION
    record = finite({"format": version, "manifest": to_plain(manifest), "files": files})
    record["seal"] = json_digest(record)
    publish(directory / MANIFEST_FILE, json_text(record, indent=1, sort_keys=True))


def read(directory: StoragePath) -> tuple[Manifest, dict[str, list[Any]]]:
    """Returns the manifest of a checkpoint, and its files as in `write`.

    Raises `DamagedError` if the manifest is missing or differs from what was written, and `OtherFormatError`.
    """
    try:
        record = json.loads(read_file(directory / MANIFEST_FILE).decode())
    except FileNotFoundError:
        raise DamagedError(f"it has no commit marker {MANIFEST_FILE}") from None
    except (ValueError, RecursionError):
        raise DamagedError(f"its {MANIFEST_FILE} is damaged") from None
    if not isinstance(record, dict):
        raise DamagedError(f"its {MANIFEST_FILE} is damaged")
    version = record.get("format")
    seal = record.pop("seal", None)
    sealed = seal == json_digest(record)
    # The first version had no seal, and all later versions have this one. Anything else is damage, not another version.
    supported = version in _VERSIONS
    if type(version) is int and 0 < version < 1000 and not supported and (sealed or seal is None):
        newer = version > _VERSIONS[-1]
        raise OtherFormatError(
            f"checkpoint {directory} has format version {version}, but this jaxmnt ({__version__}) reads "
            f"{_VERSIONS[0]} to {_VERSIONS[-1]}; use {'a newer' if newer else 'an older'} jaxmnt, or choose "
            "another directory"
        )
    if not sealed or not supported:
        raise DamagedError(f"its {MANIFEST_FILE} is damaged: its seal does not match its content")
    try:
        _Record.model_validate(record)
    except ValidationError as error:
        raise DamagedError(f"its {MANIFEST_FILE} is damaged: {first_problem(error)}") from None
    manifest = from_plain(record["manifest"])
    for name, array in record["manifest"]["arrays"].items():
        if manifest.bound_digest(name) != array["digest"]:
            raise DamagedError(
                f"its {MANIFEST_FILE} is damaged: the digest of {name} does not belong to this array, step and run"
            )
    return manifest, record["files"]


def first_problem(error: ValidationError) -> str:
    """Describes the first validation error of a record in one line."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field_path = ".".join(str(part) for part in first["loc"]) or "the whole record"
    return printable(f"{field_path[:200]}: {first['msg'][0].lower()}{first['msg'][1:]}")


def from_plain(fields: dict[str, Any]) -> Manifest:
    """Returns the manifest that `to_plain` has turned into these fields."""
    arrays_of = lambda entries: {
        name: Array(tuple(array["shape"]), array["dtype"], array["content"]) for name, array in entries.items()
    }
    base = fields.get("base")
    return Manifest(
        **{
            **fields,
            "arrays": arrays_of(fields["arrays"]),
            "base": None if base is None else Base(base["source"], arrays_of(base["arrays"])),
        }
    )


def to_plain(manifest: Manifest) -> dict[str, Any]:
    """Returns the manifest's fields as plain JSON types, and with each array its bound digest."""
    fields = asdict(manifest)
    if manifest.base is None:
        del fields["base"]  # versions before _BASE_VERSION do not have it
    for name, array in fields["arrays"].items():
        array["digest"] = manifest.bound_digest(name)
    return fields


_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "uint32": 4, "int8": 1, "uint8": 1, "bool": 1}


# The schema of a sealed record. A seal does not prove who wrote a record, so the record is validated like any input.

_Text = Annotated[str, Field(max_length=4096)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*$", max_length=1000)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Parent(_Strict):
    """A run and step that another run was forked from."""

    run: _Text
    step: _Count
    path: _Text
    row: _Count | None = None
    """Number of rows that the parent had read at `step`; None in branches made by earlier versions."""
    used: dict[_Text, _Count] | None = None
    """Number of rows that the parent had read from each data source at `step`, by the source's name; None as for
    `row`."""


class _BaseArray(_Strict):
    shape: list[_Count]
    dtype: Annotated[str, Field(pattern=f"^({'|'.join(_ELEMENT_BYTES)})$")]
    content: _Text


class _Array(_BaseArray):
    digest: _Text


class _Base(_Strict):
    source: _Text
    arrays: dict[_Name, _BaseArray]


class _Manifest(_Strict):
    run: Annotated[str, Field(min_length=1, max_length=200)]
    step: _Count
    arrays: dict[_Name, _Array]
    config: dict[str, Any]
    tokens: _Count
    data: dict[_Text, _Text]
    loss: float | None
    lineage: list[Parent]
    time: Annotated[float, Field(ge=0, le=1e11)]
    jaxmnt: _Text
    libraries: dict[_Text, _Text]
    base: _Base | None = None


class _Record(_Strict):
    format: int
    manifest: _Manifest
    files: dict[_Text, Annotated[tuple[_Count, _Text | None], Strict(False)]]

    @field_validator("files")
    @classmethod
    def _check_inside(cls, files: dict[str, Any]) -> dict[str, Any]:
        for name in files:
            path = PurePosixPath(name)
            if "\0" in name or name != str(path) or {"/", ".", ".."} & {*path.parts, name}:
                raise ValueError(f"{name!r} is not the path of a file in a checkpoint")
        return files
