"""Where checkpoints are: a folder, or an address in Google Cloud Storage with as much of `pathlib` as is used here.

What differs between the two is below as functions. An object appears whole or not at all and can be made only if there
is none, as a file can; but there are no directories to rename, so a tree is copied and what was copied is deleted.
What fails of it is an `UnreachableError`, or FileNotFoundError and FileExistsError as of files.
"""

import errno
import functools
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jaxmnt.errors import ConfigError, ExitCode, UserError, how_to_install

SCHEME = "gs://"
_CONNECTIONS = 10


class UnreachableError(OSError, UserError):
    """The bucket is not there, refuses access or does not answer. Only the last may pass by itself."""

    def __init__(self, number: int, words: str, where: str):
        super().__init__(number, words, where)
        self.exit_code = ExitCode.FAILURE if number == errno.EIO else ExitCode.CONFIG

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}; fix that and try again"


@dataclass(frozen=True, order=True)
class Address:
    """gs://BUCKET/PATH: an object, or what begins with it like a directory."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, part: str) -> "Address":
        return Address(f"{self.url}/{part}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "Address":
        return Address(self.url.rpartition("/")[0])

    def with_name(self, name: str) -> "Address":
        return self.parent / name

    def absolute(self) -> "Address":
        return self

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        with _in_words(self):
            return bool(self._blob().exists())

    def is_dir(self) -> bool:
        with _in_words(self):
            return (
                next(iter(_client().list_blobs(self._bucket, prefix=f"{self._key}/", max_results=1)), None) is not None
            )

    def iterdir(self) -> Iterator["Address"]:
        """What is directly below it, in order."""
        with _in_words(self):
            listing = _client().list_blobs(self._bucket, prefix=f"{self._key}/", delimiter="/")
            objects = [blob.name for blob in listing]
            found = {key.rstrip("/") for key in [*objects, *listing.prefixes]} - {self._key}
        return iter(sorted(Address(f"{SCHEME}{self._bucket}/{key}") for key in found))

    def read_bytes(self) -> bytes:
        with _in_words(self):
            return bytes(self._blob().download_as_bytes())

    def write_bytes(self, content: bytes) -> None:
        with _in_words(self):
            self._blob().upload_from_string(content, content_type="application/octet-stream")

    def unlink(self, missing_ok: bool = False) -> None:
        with suppress(*([FileNotFoundError] if missing_ok else [])), _in_words(self):
            self._blob().delete()

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """There is nothing to make."""

    @property
    def _bucket(self) -> str:
        return self.url.removeprefix(SCHEME).partition("/")[0]

    @property
    def _key(self) -> str:
        return self.url.removeprefix(SCHEME).partition("/")[2]

    def _blob(self) -> Any:
        return _client().bucket(self._bucket).blob(self._key)

    def _blobs(self) -> list[Any]:
        """All objects below it."""
        return list(_client().list_blobs(self._bucket, prefix=f"{self._key}/"))


StoragePath = Path | Address


def storage_path(text: str) -> StoragePath:
    """A folder or gs:// address. Raises `ConfigError` if it is neither, and if the libraries are not installed."""
    if trouble := wrong_with_path(text):
        raise ConfigError(f"{text} {trouble}")
    if not text.startswith(SCHEME):
        return Path(text)
    _client()
    return Address(text.rstrip("/"))


def wrong_with_path(text: str) -> str | None:
    """Why a text cannot name a place, in words, or None."""
    if not text.startswith(SCHEME):
        return "is neither a folder nor a gs:// address; give one of these" if "://" in text else None
    bucket, _, path = text.removeprefix(SCHEME).rstrip("/").partition("/")
    return None if bucket and path else "lacks a path in the bucket; give one, as in gs://BUCKET/runs/a"


def url(path: StoragePath) -> str:
    """As TensorStore wants it."""
    return f"file://{quote(str(path.absolute()))}" if isinstance(path, Path) else f"{SCHEME}{quote(path.url[5:])}"


def is_link(path: StoragePath) -> bool:
    """Whether it leads elsewhere. What is there is somebody's own: read, and never written or removed."""
    return isinstance(path, Path) and path.is_symlink()


def is_there(path: StoragePath) -> bool:
    """Whether something has this name, be it a link that leads nowhere."""
    return is_link(path) or path.exists()


def first_free(path: StoragePath, suffixes: Iterable[str]) -> StoragePath:
    """The path with the first of these suffixes under which nothing is."""
    return next(free for suffix in suffixes if not is_there(free := path.with_name(f"{path.name}{suffix}")))


def files(path: StoragePath) -> dict[str, int]:
    """Bytes of all files below it, by relative name, in order; empty if it is not there. Links are not followed."""
    if isinstance(path, Path):
        return dict(sorted(_sizes(path)))
    with _in_words(path):
        prefix = f"{path._key}/"
        return {blob.name.removeprefix(prefix): blob.size for blob in path._blobs() if not blob.name.endswith("/")}


def sizes(path: StoragePath, names: Iterable[str]) -> dict[str, int]:
    """Bytes of those of these files below it that are there, through links, too."""
    if not isinstance(path, Path):
        present = files(path)
        return {name: present[name] for name in names if name in present}
    found = {}
    for name in names:
        with suppress(FileNotFoundError, NotADirectoryError):
            found[name] = (path / name).stat().st_size
    return found


NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG)
"""What is wrong with what is there, or has just gone, whoever looks. Other trouble says nothing about it."""


def read(path: StoragePath) -> bytes:
    """What is in a file. Raises `OSError` with its name, also for a pipe or the like, which would never end."""
    if isinstance(path, Address):
        return path.read_bytes()
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "it is not a file", str(path))
    try:
        with os.fdopen(descriptor, "rb") as file:
            return file.read()
    except OSError as error:
        error.filename = str(path)
        raise


def read_all(path: StoragePath, names: Iterable[str]) -> dict[str, bytes]:
    """The contents of small files below it; from an address, many at a time."""
    if isinstance(path, Path):
        return {name: read(path / name) for name in names}
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        return dict(pool.map(lambda name: (name, (path / name).read_bytes()), names))


def _sizes(path: Path) -> Iterator[tuple[str, int]]:
    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error  # what cannot be looked at is not missing

    for folder, _, names in os.walk(path, onerror=refuse):
        for name in names:
            file = Path(folder, name)
            with suppress(FileNotFoundError):  # removed just now, as all of the step will be
                yield str(file.relative_to(path)), file.lstat().st_size


def json_digest(tree: Any) -> str:
    """SHA-256 of a tree of plain values, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def publish(path: StoragePath, text: str) -> None:
    """Writes a file whole or not at all."""
    publish_bytes(path, text.encode())


def publish_bytes(path: StoragePath, content: bytes) -> None:
    """Like `publish`."""
    if isinstance(path, Address):
        return path.write_bytes(content)
    temporary = path.with_name(f".{path.name}.tmp")  # always the same, so that kills leave no more than one
    temporary.unlink(missing_ok=True)
    # A new file, so never through a link.
    write_new(temporary, content)
    try:
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_new(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Writes a file that is not there yet, down to the disk. What could not be written whole is removed.

    Raises `OSError` with the file's name, and FileExistsError if there is one.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        with suppress(OSError):
            path.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def create(path: StoragePath, text: str) -> bool:
    """Makes a file with this text; False if there is one already."""
    try:
        if isinstance(path, Address):
            with _in_words(path):
                path._blob().upload_from_string(text.encode(), if_generation_match=0)
        else:
            write_new(path, text.encode())
    except FileExistsError:
        return False
    return True


def remove_if(path: StoragePath, text: str) -> bool:
    """Removes a file that holds just this text; never one that somebody else has put there meanwhile."""
    wanted = text.encode(errors="surrogateescape")
    with suppress(FileNotFoundError, FileExistsError):
        if isinstance(path, Address):
            with _in_words(path):
                blob = path._blob()
                blob.reload()
                if blob.download_as_bytes(if_generation_match=blob.generation) != wanted:
                    return False
                blob.delete(if_generation_match=blob.generation)
                return True
        if read(path) != wanted:
            return False
        aside = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
        path.rename(aside)
        if aside.read_bytes() == wanted:
            aside.unlink()
            return True
        with suppress(FileExistsError):
            os.link(aside, path)
        aside.unlink()
    return False


def move(path: StoragePath, target: StoragePath) -> None:
    """Renames a file or a tree. Cut off half-way, an address has both: the old one whole, or the new one."""
    if isinstance(path, Path):
        assert isinstance(target, Path)
        path.rename(target)
        return
    assert isinstance(target, Address)
    from google.api_core.exceptions import PreconditionFailed

    bucket = _client().bucket(target._bucket)

    def copy(blob: Any) -> None:
        made, token = bucket.blob(target._key + blob.name.removeprefix(path._key)), ""
        with suppress(PreconditionFailed):  # it is there: the answer to an earlier try was lost
            while token is not None:
                token, *_ = made.rewrite(blob, token=token or None, if_generation_match=0)

    with _in_words(path):
        blobs = [*path._blobs(), *([path._blob()] if path.is_file() else [])]
        _each(copy, blobs)
        _each(_delete, blobs)


def remove(path: StoragePath) -> None:
    """Removes a tree, which need not be there. Raises `OSError` for a link: nothing is removed through one."""
    if isinstance(path, Address):
        with _in_words(path):
            _each(_delete, path._blobs())
    elif is_there(path):
        if path.resolve() != path.parent.resolve() / path.name:
            raise OSError(errno.ELOOP, "it is a link, and nothing is removed through one", str(path))
        shutil.rmtree(path)


def _delete(blob: Any) -> None:
    from google.api_core.exceptions import NotFound

    with suppress(NotFound):  # the answer to an earlier try was lost
        blob.delete()


def _each(action: Callable[[Any], None], blobs: list[Any]) -> None:
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        list(pool.map(action, blobs))


@functools.lru_cache(maxsize=1)
def _client() -> Any:
    try:
        import fsspec.config
        from google.cloud import storage

        import_module("gcsfs")  # Orbax writes its own files through it
    except ImportError as error:
        raise ConfigError(f"gs:// needs {error.name}, which is not installed; {how_to_install('gs')}") from error
    # It would not see what other processes, or TensorStore in this one, have written since.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    with _in_words("gs://"):
        return storage.Client(project=None)


@contextmanager
def _in_words(where: object) -> Iterator[None]:
    from google.api_core import exceptions as api
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
    from requests.exceptions import RequestException

    def trouble(number: int, words: str, error: Exception) -> UnreachableError:
        return UnreachableError(number, f"{words}{str(error).strip().splitlines()[0][:200].rstrip('.')}", str(where))

    try:
        yield
    except api.NotFound as error:
        if "bucket does not exist" in str(error):
            raise trouble(errno.ENOENT, "there is no such bucket: ", error) from error
        raise FileNotFoundError(errno.ENOENT, "there is no such object", str(where)) from error
    except api.PreconditionFailed as error:
        raise FileExistsError(errno.EEXIST, "somebody else wrote it", str(where)) from error
    except (api.Forbidden, api.Unauthorized, GoogleAuthError) as error:
        raise trouble(errno.EACCES, "Google Cloud Storage refuses access: ", error) from error
    except (api.GoogleAPIError, RequestException, DataCorruption, InvalidResponse) as error:
        raise trouble(errno.EIO, "Google Cloud Storage does not answer as it should: ", error) from error
