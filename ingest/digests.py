"""SHA-256 of every input, remembered by size and time so that an unchanged study is recognised in seconds."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import fsspec
from dask import compute
from dask.delayed import delayed
from fsspec.core import split_protocol

from expectations.store import write_text
from ingest.nifti import digest
from ingest.problems import BadInput

Digest = tuple[str, int]
RACY_S = 2.0  # a file changed this shortly before it was hashed may change again within its clock tick: hash it anew


def digest_all(
    urls: Sequence[str], cache: Path, on_done: Callable[[], None], *, are_all: bool = True
) -> tuple[dict[str, Digest], list[BadInput]]:
    """SHA-256 and size of many files, in parallel threads.

    Args:
        urls: Local paths or fsspec URLs, without repeats.
        cache: JSON file that remembers hashes by size and modification time (or the remote's own version key).
        on_done: Called once per file.
        are_all: Whether these are all files of the study; else the cache keeps what it knows of others.

    Returns:
        Digests by URL, and a problem for each file that could not be read.
    """
    known = _read(cache)

    def one(url: str) -> tuple[str, str, Digest] | BadInput:
        try:
            stamp = _stamp(url)
            remembered = known.get(url)
            if remembered is not None and remembered[0] == stamp:
                return url, stamp, (remembered[1], remembered[2])
            return url, stamp, digest(url)
        except BadInput as problem:
            return problem
        finally:
            on_done()

    later = delayed(one, pure=False)
    found = cast(
        "tuple[tuple[str, str, Digest] | BadInput, ...]",
        compute(*[later(url) for url in urls], scheduler="threads"),
    )
    good = [item for item in found if not isinstance(item, BadInput)]
    fresh = {url: (stamp, *value) for url, stamp, value in good if not _is_racy(url)}
    if not are_all:
        fresh = {url: value for url, value in known.items() if url not in set(urls)} | fresh
    if fresh != known:
        write_text(cache, json.dumps(fresh, indent=0))
    return {url: value for url, _, value in good}, [item for item in found if isinstance(item, BadInput)]


def _read(cache: Path) -> dict[str, tuple[str, str, int]]:
    if not cache.exists():
        return {}
    try:
        content = cast("dict[str, list[str | int]]", json.loads(cache.read_text()))
        return {url: (str(stamp), str(sha), int(size)) for url, (stamp, sha, size) in content.items()}
    except (json.JSONDecodeError, ValueError, AttributeError, TypeError):
        return {}  # a cache that cannot be read is no cache


def _stamp(url: str) -> str:
    """What changes when a file does: size, time and inode of a local file, the version key of a remote one."""
    try:
        if split_protocol(url)[0] is None:
            status = Path(url).stat()
            return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_ino}"
        filesystem, path = fsspec.url_to_fs(url)
        return filesystem.ukey(path)
    except FileNotFoundError as error:
        raise BadInput(url, "there is no such file", "Add it, or mend the pattern in the study file") from error


def _is_racy(url: str) -> bool:
    return split_protocol(url)[0] is None and time.time() - Path(url).stat().st_mtime < RACY_S
