"""Stores checkpoints in a folder or in Google Cloud Storage, whose addresses have the methods of `pathlib` used here.

The functions below hide the differences between the two. Like a file, an object in a bucket appears completely or not
at all, and can be created only if it does not exist. But there are no directories that could be renamed, so a tree is
copied and the original is deleted. Failures of the bucket raise `UnreachableError`, or FileNotFoundError and
FileExistsError as with files.
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
_MAX_CONNECTIONS = 10


class UnreachableError(OSError, UserError):
    """Raised if the bucket does not exist, refuses access or does not answer. Only the last problem may be
    temporary."""

    def __init__(self, number: int, problem: str, where: str):
        super().__init__(number, problem, where)
        self.exit_code = ExitCode.FAILURE if number == errno.EIO else ExitCode.CONFIG

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}; fix that and try again"


@dataclass(frozen=True, order=True)
class Address:
    """gs://BUCKET/PATH: an object, or the prefix of objects, which acts as a directory."""

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
        with _storage_errors(self):
            return bool(self._blob().exists())

    def is_dir(self) -> bool:
        with _storage_errors(self):
            return (
                next(iter(_client().list_blobs(self._bucket, prefix=f"{self._key}/", max_results=1)), None) is not None
            )

    def iterdir(self) -> Iterator["Address"]:
        """Returns the direct children, sorted."""
        with _storage_errors(self):
            listing = _client().list_blobs(self._bucket, prefix=f"{self._key}/", delimiter="/")
            objects = [blob.name for blob in listing]
            keys = {key.rstrip("/") for key in [*objects, *listing.prefixes]} - {self._key}
        return iter(sorted(Address(f"{SCHEME}{self._bucket}/{key}") for key in keys))

    def read_bytes(self) -> bytes:
        with _storage_errors(self):
            return bytes(self._blob().download_as_bytes())

    def write_bytes(self, content: bytes) -> None:
        with _storage_errors(self):
            self._blob().upload_from_string(content, content_type="application/octet-stream")

    def unlink(self, missing_ok: bool = False) -> None:
        with suppress(*([FileNotFoundError] if missing_ok else [])), _storage_errors(self):
            self._blob().delete()

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing, because a bucket has no directories."""

    @property
    def _bucket(self) -> str:
        return self.url.removeprefix(SCHEME).partition("/")[0]

    @property
    def _key(self) -> str:
        return self.url.removeprefix(SCHEME).partition("/")[2]

    def _blob(self) -> Any:
        return _client().bucket(self._bucket).blob(self._key)

    def _blobs(self) -> list[Any]:
        """Returns all objects below this address."""
        return list(_client().list_blobs(self._bucket, prefix=f"{self._key}/"))


StoragePath = Path | Address


def storage_path(text: str) -> StoragePath:
    """Returns the path of a folder or gs:// address. Raises `ConfigError` if it is neither, or if the libraries for
    gs:// are not installed."""
    if problem := path_problem(text):
        raise ConfigError(f"{text} {problem}")
    if not text.startswith(SCHEME):
        return Path(text)
    _client()
    return Address(text.rstrip("/"))


def path_problem(text: str) -> str | None:
    """Returns a phrase that says why a text is not a storage path, or None if it is one."""
    if not text.startswith(SCHEME):
        return "is neither a folder nor a gs:// address; give one of these" if "://" in text else None
    bucket, _, path = text.removeprefix(SCHEME).rstrip("/").partition("/")
    return None if bucket and path else "lacks a path in the bucket; give one, as in gs://BUCKET/runs/a"


def url(path: StoragePath) -> str:
    """Returns the path as a URL, which is the form that TensorStore takes."""
    return f"file://{quote(str(path.absolute()))}" if isinstance(path, Path) else f"{SCHEME}{quote(path.url[5:])}"


def is_link(path: StoragePath) -> bool:
    """Returns True for a symbolic link. Data behind a link may be read, but is never modified."""
    return isinstance(path, Path) and path.is_symlink()


def is_there(path: StoragePath) -> bool:
    """Returns True if there is anything at this path, including a broken link."""
    return is_link(path) or path.exists()


def first_free(path: StoragePath, suffixes: Iterable[str]) -> StoragePath:
    """Appends each suffix to the path in turn, and returns the first result at which nothing exists."""
    candidates = (path.with_name(f"{path.name}{suffix}") for suffix in suffixes)
    return next(candidate for candidate in candidates if not is_there(candidate))


def file_sizes(path: StoragePath) -> dict[str, int]:
    """Returns the size in bytes of each file below a path, by its relative name, sorted. The result is empty if the
    path does not exist. Links are not followed."""
    if isinstance(path, Path):
        return dict(sorted(_walk_sizes(path)))
    with _storage_errors(path):
        prefix = f"{path._key}/"
        return {blob.name.removeprefix(prefix): blob.size for blob in path._blobs() if not blob.name.endswith("/")}


def sizes_of(path: StoragePath, names: Iterable[str]) -> dict[str, int]:
    """Returns the size in bytes of each named file below a path; files that do not exist are left out. Links are
    followed."""
    if not isinstance(path, Path):
        all_sizes = file_sizes(path)
        return {name: all_sizes[name] for name in names if name in all_sizes}
    present = {}
    for name in names:
        with suppress(FileNotFoundError, NotADirectoryError):
            present[name] = (path / name).stat().st_size
    return present


UNUSABLE_FILE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG)
"""Error numbers that mean that the file itself is missing or unusable. Others, such as I/O errors, do not mean that."""


def read(path: StoragePath) -> bytes:
    """Returns the content of a file. Raises an `OSError` that names the file if it cannot be read, or if it is a pipe
    or a device, since reading one could block."""
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
    """Returns the contents of small files below a path. From a bucket, several are read at a time."""
    if isinstance(path, Path):
        return {name: read(path / name) for name in names}
    with ThreadPoolExecutor(_MAX_CONNECTIONS) as pool:
        return dict(pool.map(lambda name: (name, (path / name).read_bytes()), names))


def _walk_sizes(path: Path) -> Iterator[tuple[str, int]]:
    """Yields the relative name and the size in bytes of each file below a folder."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error  # a folder that cannot be listed is not missing

    for folder, _, names in os.walk(path, onerror=refuse):
        for name in names:
            file = Path(folder, name)
            with suppress(FileNotFoundError):  # another process is removing the checkpoint
                yield str(file.relative_to(path)), file.lstat().st_size


def json_digest(tree: Any) -> str:
    """Returns the SHA-256 digest of a tree of JSON values. It does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def publish(path: StoragePath, text: str) -> None:
    """Writes a text file completely or not at all."""
    publish_bytes(path, text.encode())


def publish_bytes(path: StoragePath, content: bytes) -> None:
    """Writes a file completely or not at all."""
    if isinstance(path, Address):
        return path.write_bytes(content)
    temporary = path.with_name(f".{path.name}.tmp")  # a fixed name, so that kills leave at most one such file
    temporary.unlink(missing_ok=True)
    # A new file is never written through a link.
    write_new(temporary, content)
    try:
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_new(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Creates a file and flushes it to disk. A file that could not be written completely is removed again.

    Raises `OSError` with the file's name, and FileExistsError if the file exists.
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
    """Creates a file with this text. Returns False if it exists already."""
    try:
        if isinstance(path, Address):
            with _storage_errors(path):
                path._blob().upload_from_string(text.encode(), if_generation_match=0)
        else:
            write_new(path, text.encode())
    except FileExistsError:
        return False
    return True


def remove_if(path: StoragePath, text: str) -> bool:
    """Removes a file if it holds exactly this text, but never a file that another process has put in its place
    meanwhile. Returns True if the file was removed."""
    content = text.encode(errors="surrogateescape")
    with suppress(FileNotFoundError, FileExistsError):
        if isinstance(path, Address):
            with _storage_errors(path):
                blob = path._blob()
                blob.reload()
                if blob.download_as_bytes(if_generation_match=blob.generation) != content:
                    return False
                blob.delete(if_generation_match=blob.generation)
                return True
        if read(path) != content:
            return False
        # The file is renamed and read again, because it may have been replaced since.
        renamed = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
        path.rename(renamed)
        if renamed.read_bytes() == content:
            renamed.unlink()
            return True
        with suppress(FileExistsError):
            os.link(renamed, path)
        renamed.unlink()
    return False


def move(path: StoragePath, target: StoragePath) -> None:
    """Renames a file or a tree. If it is interrupted in a bucket, both may exist, but one of them is
    complete."""
    if isinstance(path, Path):
        assert isinstance(target, Path)
        path.rename(target)
        return
    assert isinstance(target, Address)
    from google.api_core.exceptions import PreconditionFailed

    bucket = _client().bucket(target._bucket)

    def copy(blob: Any) -> None:
        new_blob, token = bucket.blob(target._key + blob.name.removeprefix(path._key)), ""
        with suppress(PreconditionFailed):  # the object exists if the answer to an earlier request was lost
            while token is not None:
                token, *_ = new_blob.rewrite(blob, token=token or None, if_generation_match=0)

    with _storage_errors(path):
        blobs = [*path._blobs(), *([path._blob()] if path.is_file() else [])]
        _for_each(copy, blobs)
        _for_each(_delete, blobs)


def remove(path: StoragePath) -> None:
    """Removes a tree if it exists. Raises `OSError` for a link, because nothing may be removed through a link."""
    if isinstance(path, Address):
        with _storage_errors(path):
            _for_each(_delete, path._blobs())
    elif is_there(path):
        if path.resolve() != path.parent.resolve() / path.name:
            raise OSError(errno.ELOOP, "it is a link, and nothing is removed through one", str(path))
        shutil.rmtree(path)


def _delete(blob: Any) -> None:
    from google.api_core.exceptions import NotFound

    with suppress(NotFound):  # the object is gone if the answer to an earlier request was lost
        blob.delete()


def _for_each(action: Callable[[Any], None], blobs: list[Any]) -> None:
    """Calls `action` for all blobs, several at a time."""
    with ThreadPoolExecutor(_MAX_CONNECTIONS) as pool:
        list(pool.map(action, blobs))


@functools.lru_cache(maxsize=1)
def _client() -> Any:
    try:
        import fsspec.config
        from google.cloud import storage

        import_module("gcsfs")  # Orbax writes its own files with it
    except ImportError as error:
        raise ConfigError(f"gs:// needs {error.name}, which is not installed; {how_to_install('gs')}") from error
    # With the cache, fsspec would not see files that other processes, or TensorStore, have written since.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    with _storage_errors("gs://"):
        return storage.Client(project=None)


@contextmanager
def _storage_errors(where: object) -> Iterator[None]:
    """Converts exceptions of the client library to `UnreachableError`, FileNotFoundError and FileExistsError."""
    from google.api_core import exceptions as api
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
    from requests.exceptions import RequestException

    def unreachable(number: int, problem: str, error: Exception) -> UnreachableError:
        detail = str(error).strip().splitlines()[0][:200].rstrip(".")
        return UnreachableError(number, f"{problem}{detail}", str(where))

    try:
        yield
    except api.NotFound as error:
        if "bucket does not exist" in str(error):
            raise unreachable(errno.ENOENT, "there is no such bucket: ", error) from error
        raise FileNotFoundError(errno.ENOENT, "there is no such object", str(where)) from error
    except api.PreconditionFailed as error:
        raise FileExistsError(errno.EEXIST, "somebody else wrote it", str(where)) from error
    except (api.Forbidden, api.Unauthorized, GoogleAuthError) as error:
        raise unreachable(errno.EACCES, "Google Cloud Storage refuses access: ", error) from error
    except (api.GoogleAPIError, RequestException, DataCorruption, InvalidResponse) as error:
        raise unreachable(errno.EIO, "Google Cloud Storage does not answer as it should: ", error) from error
