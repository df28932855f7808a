"""NIfTI volumes, read fast and with suspicion.

What is read: NIfTI-1 and NIfTI-2, single files and `.hdr`/`.img` pairs (by either path), plain or gzip-compressed, of
either byte order, from local paths and fsspec URLs. Compression is told from the first bytes and never from the name,
so a `.nii.gz` that is not compressed and a `.nii` that is are both read. Only an `.img` file, which has no magic of its
own, may begin like gzip by chance: without `.gz` in its name it counts as compressed where it decompresses faultlessly.

What is trusted: nothing. A header's claims are checked against the bytes that are really there before anything of the
claimed size is allocated, and every refusal is a `BadInput`. Geometry (voxel size, orientation, affines) is recorded
and never obeyed, so odd geometry is no error.

Choices where the format leaves room:

- A single file whose `vox_offset` is 0 has its voxels right behind the header, at byte 352 (NIfTI-2: 544), the
  smallest value the format allows. Other values below that are refused (nibabel refuses them too; at 0 it would read
  the header as voxels). Fractions are cut off. Any larger value is honoured, aligned or not.
- `scl_slope` 0 or non-finite means "no scaling". A non-finite `scl_inter` beside a valid slope is refused, as in
  nibabel.
- Byte order is told by `dim[0]` (1 to 7 in exactly one order), as the format prescribes; `sizeof_hdr` and `bitpix` are
  ignored. The units of `xyzt_units` are ignored: voxel sizes count as mm.
- FreeSurfer's special vector shapes are not interpreted.
- Up to 1 MiB behind the last voxel is ignored, and so is anything of that size behind the last gzip member. More is
  refused: such a file holds something else than its header says, or is a decompression bomb.

Source: the NIfTI-1 and NIfTI-2 data format definitions, https://nifti.nimh.nih.gov/.
"""

import hashlib
import math
import os
import re
import stat
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

import deflate
import nibabel.orientations
import numpy as np
from nibabel.nifti1 import header_dtype as nifti1_layout
from nibabel.nifti2 import header_dtype as nifti2_layout
from numpy.typing import NDArray

from ingest.problems import BadInput

GZIP_MAGIC = b"\x1f\x8b\x08"
SLACK_BYTES = 1 << 20
"""How much may stand behind the last voxel: padding and trailers are shorter, another volume or a bomb is longer."""

LABEL_TOLERANCE = 0.01
"""How far a stored label may lie from a whole number, see `read_labels`."""

_START_BYTES = 1 << 17  # enough for the longest gzip header (64 KiB of extra field) and a NIfTI header behind it
_BLOCK_BYTES = 1 << 20
_CHUNK_VOXELS = 1 << 15  # 256 KiB of float64: a chunk and its temporaries stay in the second-level cache
_DEFLATE_MAX_RATIO = 1032  # RFC 1951: 258 bytes from two bits

_VOXEL_TYPES = {
    2: "u1",
    4: "i2",
    8: "i4",
    16: "f4",
    64: "f8",
    256: "i1",
    512: "u2",
    768: "u4",
    1024: "i8",
    1280: "u8",
}
_OTHER_TYPES = {
    0: "of unknown type",
    1: "single bits",
    32: "complex (complex64)",
    128: "RGB colours",
    1536: "float128",
    1792: "complex (complex128)",
    2048: "complex (complex256)",
    2304: "RGBA colours",
}

_EXPORT_AGAIN = "Copy or export the file again"


@dataclass(frozen=True)
class Header:
    """What a file says about its array and its place in space.

    Attributes:
        shape: Voxels along the three stored axes; a 2-D array is one slice.
        dtype: numpy name of the stored type, such as "int16".
        is_big_endian: Whether the file is big-endian.
        slope: Factor from stored to true values; 1 where the file declares no scaling.
        intercept: Offset from stored to true values; 0 where the file declares no scaling.
        voxel_mm: `pixdim[1..3]` as stored, whatever it is (zero, negative or NaN included).
        orientation: Axis codes of the best affine (sform before qform), such as "RAS"; "" where neither is set or the
            affine is degenerate.
        affine_source: "sform", "qform", "none", or "contradictory" where both are set and differ by more than 0.001 mm
            in the origin or 0.001 of a voxel's size in a column.
    """

    shape: tuple[int, int, int]
    dtype: str
    is_big_endian: bool
    slope: float
    intercept: float
    voxel_mm: tuple[float, float, float]
    orientation: str
    affine_source: str

    @property
    def header_voxel_mm3(self) -> float | None:
        """Voxel volume by the header in mm3; None where any voxel size is zero or non-finite."""
        volume = abs(math.prod(self.voxel_mm))
        return volume if math.isfinite(volume) and volume > 0 else None

    @property
    def is_scaled(self) -> bool:
        """Whether true values differ from stored ones."""
        return self.slope != 1.0 or self.intercept != 0.0


@dataclass(frozen=True, eq=False)
class Volume:
    """A scored volume.

    Attributes:
        header: What the file says about it.
        sha256: Hexadecimal digest of the stored bytes, see `digest`.
        byte_count: Number of stored bytes.
        values: float32 of shape `header.shape`, Fortran order, native, aligned and writable.
    """

    header: Header
    sha256: str
    byte_count: int
    values: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class LabelVolume:
    """A mask.

    Attributes:
        header: What the file says about it.
        sha256: Hexadecimal digest of the stored bytes, see `digest`.
        byte_count: Number of stored bytes.
        mask: bool of shape `header.shape`, Fortran order and writable.
    """

    header: Header
    sha256: str
    byte_count: int
    mask: NDArray[np.bool_]


def digest(url: str) -> tuple[str, int]:
    """SHA-256 and size of a file as stored, in constant memory; the content may be anything.

    Args:
        url: Local path or fsspec URL. For either half of a `.hdr`/`.img` pair both files count, header first.

    Returns:
        Hexadecimal digest, and number of bytes (0 for an empty file).

    Raises:
        BadInput: A file is missing or cannot be read.
    """
    hasher = hashlib.sha256()
    byte_count = 0
    for part in _parts(url):
        with _reading(part), _open(part) as file:
            while block := file.read(_BLOCK_BYTES):
                hasher.update(block)
                byte_count += len(block)
    return hasher.hexdigest(), byte_count


def read_header(url: str) -> Header:
    """Read the header only: the first 128 KiB of the file at most, and of those a few KiB decompressed.

    Args:
        url: Local path or fsspec URL; either half of a pair.

    Returns:
        The header.

    Raises:
        BadInput: The file is missing, no NIfTI, of a kind this project does not measure, or too short or too long
            (compressed: too short to hold, at the best compression there is) for what its header says.
    """
    return _layout(_parts(url)).header


def read_scores(url: str) -> Volume:
    """Read a volume of scores as float32.

    A value is `stored * slope + intercept` in float64, rounded once to float32; scaling and conversion go chunk by
    chunk. Native, aligned and unscaled float32 is a view of the decompressed bytes. NaN and infinity are kept (see
    `count_non_finite`), and a float64 beyond the range of float32 becomes infinite.

    Args:
        url: Local path or fsspec URL; either half of a pair.

    Returns:
        The volume.

    Raises:
        BadInput: As `read_header`, or the voxels are damaged or missing.
    """
    voxels = _read_voxels(url)
    values = _as_scores(voxels.stored, voxels.header)
    return Volume(voxels.header, voxels.sha256, voxels.byte_count, values.reshape(voxels.header.shape, order="F"))


def read_labels(url: str, labels: Sequence[int] | None) -> LabelVolume:
    """Read a label map as a mask.

    A value is `stored * slope + intercept` in float64, rounded to the nearest whole number (half to even). It must lie
    within 0.01 of it: storing labels in scaled integers moves them by less (0.002 for labels up to 255 in 16 bits, and
    a mask stored as 0.9999 is a mask), whereas a probability map or an interpolated mask, which rounding would turn
    into a plausible reference, has voxels all over the range.

    Args:
        url: Local path or fsspec URL; either half of a pair.
        labels: The labels that make the mask; None for every label but 0. An empty sequence selects nothing.

    Returns:
        The mask.

    Raises:
        BadInput: As `read_scores`, or some value is no label; count and an example are given.
    """
    voxels = _read_voxels(url)
    mask = _as_mask(url, voxels.stored, voxels.header, labels)
    return LabelVolume(voxels.header, voxels.sha256, voxels.byte_count, mask.reshape(voxels.header.shape, order="F"))


def count_non_finite(values: NDArray[np.float32]) -> int:
    """Number of NaN and infinite values; 0 for an empty array."""
    return values.size - int(np.count_nonzero(np.isfinite(values)))


# Bytes: from local files and fsspec URLs


class _FileSystem(Protocol):
    def info(self, path: str) -> dict[str, Any]: ...
    def open(self, path: str, mode: str) -> BinaryIO: ...
    def cat_file(self, path: str, start: int | None, end: int | None) -> bytes: ...


class _Fsspec(Protocol):
    def url_to_fs(self, url: str) -> tuple[_FileSystem, str]: ...


def _is_url(path: str) -> bool:
    return "://" in path


def _file_system(url: str) -> tuple[_FileSystem, str]:
    return cast(_Fsspec, import_module("fsspec.core")).url_to_fs(url)


@contextmanager
def _reading(url: str) -> Generator[None, None, None]:
    """Turn whatever goes wrong inside into a `BadInput` about `url`."""
    try:
        yield
    except BadInput:
        raise
    except FileNotFoundError as error:
        raise BadInput(url, "no such file", "Check the path, or the pattern in the study file") from error
    except Exception as error:  # every fsspec driver raises its own kinds, a missing driver ImportError
        found = f"cannot be read ({type(error).__name__}: {error})"
        raise BadInput(url, found, "Check its permissions, or for a URL the address and the fsspec driver") from error


def _open(url: str) -> BinaryIO:
    if _is_url(url):
        file_system, path = _file_system(url)
        return file_system.open(path, "rb")
    return Path(url).open("rb", buffering=0)


def _size(url: str) -> int | None:
    """Bytes of a regular file, None where a server does not tell."""
    with _reading(url):
        if _is_url(url):
            file_system, path = _file_system(url)
            info = file_system.info(path)
            kind, size = info.get("type"), cast(int | None, info.get("size"))
        else:
            status = Path(url).stat()
            kind = "directory" if stat.S_ISDIR(status.st_mode) else stat.S_ISREG(status.st_mode) and "file"
            size = status.st_size
    if kind == "directory":
        raise BadInput(url, "is a folder, not a file", "Let the pattern name a file inside it")
    if kind != "file":
        raise BadInput(url, "is no regular file", "Give the path of a file")
    return size


def _bytes(url: str, limit: int | None = None) -> NDArray[np.uint8]:
    """The file's bytes, or its first `limit`."""
    with _reading(url):
        if _is_url(url):
            file_system, path = _file_system(url)
            whole = limit is None
            return np.frombuffer(file_system.cat_file(path, None if whole else 0, limit), np.uint8)[:limit]
        return _local_bytes(Path(url), limit)


def _local_bytes(path: Path, limit: int | None) -> NDArray[np.uint8]:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        content = np.empty(size if limit is None else min(size, limit), np.uint8)
        view, filled = content.data, 0
        while count := file.readinto(view[filled:]):  # one call reads 2 GiB at most
            filled += count
    return content[:filled]


def _parts(url: str) -> list[str]:
    """The file itself, or both halves of the pair it belongs to, header first."""
    _size(url)
    pair = re.fullmatch(r"(.*\.)(hdr|img)(\.gz)?", url, re.IGNORECASE | re.DOTALL)
    if pair is None:
        return [url]
    stem, half, zipped = pair.group(1), pair.group(2), pair.group(3) or ""
    is_header = half.lower() == "hdr"
    other = "img" if is_header else "hdr"
    other = other.upper() if half.isupper() else other
    names = [f"{stem}{other}{zipped}", f"{stem}{other}{'' if zipped else '.gz'}"]
    partner = next((name for name in names if _exists(name)), None)
    if partner is None:
        raise BadInput(url, f"is half of a pair, and {names[0]} is missing", "Put both halves side by side")
    return [url, partner] if is_header else [partner, url]


def _exists(url: str) -> bool:
    try:
        _size(url)
    except BadInput:
        return False
    return True


# Compression


class _Inflater(Protocol):
    @property
    def unconsumed_tail(self) -> bytes: ...
    def decompress(self, data: bytes | memoryview, max_length: int, /) -> bytes: ...


class _Libdeflate(Protocol):
    def gzip_decompress(self, data: NDArray[np.uint8], originalsize: int) -> bytearray: ...


_libdeflate = cast(_Libdeflate, deflate)


def _is_gzip(raw: NDArray[np.uint8]) -> bool:
    return raw[:3].tobytes() == GZIP_MAGIC


def _pieces(url: str, raw: NDArray[np.uint8], piece_bytes: int) -> Iterator[bytes]:
    """Decompress every gzip member with zlib, in pieces; what follows the last member is ignored."""
    rest = raw.data
    while rest[:3].tobytes() == GZIP_MAGIC:
        engine = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        used = 0
        while used < len(rest) and not engine.eof:
            block = rest[used : used + _BLOCK_BYTES]
            used += len(block)
            yield from _block_pieces(url, engine, block, piece_bytes)
        if not engine.eof:
            raise BadInput(url, f"its gzip stream breaks off after {len(raw)} bytes", _EXPORT_AGAIN)
        rest = rest[used - len(engine.unused_data) :]


def _block_pieces(url: str, engine: _Inflater, block: memoryview, piece_bytes: int) -> Iterator[bytes]:
    pending: bytes | memoryview = block
    while pending:
        try:
            piece = engine.decompress(pending, piece_bytes)
        except zlib.error as error:
            is_checksum = "incorrect data check" in str(error)
            reason = "its checksum does not match" if is_checksum else str(error).rpartition(": ")[2]
            raise BadInput(url, f"its gzip stream is damaged: {reason}", _EXPORT_AGAIN) from error
        yield piece
        pending = engine.unconsumed_tail


def _start(url: str, raw: NDArray[np.uint8]) -> bytes:
    """The first bytes of the content, at least a NIfTI-2 header's where there are as many."""
    wanted = nifti2_layout.itemsize
    if not _is_gzip(raw):
        return raw[:wanted].tobytes()
    content = b""
    for piece in _pieces(url, raw, 4096):
        content += piece
        if len(content) >= wanted:
            break
    return content


def _decompress(url: str, raw: NDArray[np.uint8], layout: "_Layout") -> NDArray[np.uint8]:
    """Decompress a gzip file whose content should end, give or take the slack, where the layout says.

    The fast way trusts the length in the file's last four bytes only where it fits what the header says, so that
    nothing is allocated on the word of one of them. Everything else (several members, trailing bytes, more than
    4 GiB, damage) goes the careful way.
    """
    size = int.from_bytes(raw[-4:].tobytes(), "little")
    if layout.end <= size <= min(layout.end + SLACK_BYTES, _DEFLATE_MAX_RATIO * raw.size):
        try:
            content = np.frombuffer(_libdeflate.gzip_decompress(raw, size), np.uint8)
        except (deflate.DeflateError, MemoryError):
            content = raw[:0]
        if content.size >= layout.end:
            return content
    return _decompress_carefully(url, raw, layout)


def _decompress_carefully(url: str, raw: NDArray[np.uint8], layout: "_Layout") -> NDArray[np.uint8]:
    """Measure the content first, piece by piece, and allocate what is really there once it fits the header."""
    size = 0
    for piece in _pieces(url, raw, _BLOCK_BYTES):
        size += len(piece)
        _refuse_excess(url, size, layout.end + SLACK_BYTES, layout)
    _refuse_shortage(url, size, layout)
    content = np.empty(size, np.uint8)
    filled = 0
    for piece in _pieces(url, raw, _BLOCK_BYTES):
        content[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
        filled += len(piece)
    return content


# The header


@dataclass(frozen=True)
class _Layout:
    """Where the voxels lie in the content of which kind of file."""

    header: Header
    voxel_type: np.dtype[Any]
    offset: int
    is_single: bool

    @property
    def voxel_bytes(self) -> int:
        return math.prod(self.header.shape) * self.voxel_type.itemsize

    @property
    def end(self) -> int:
        return self.offset + self.voxel_bytes


def _layout(parts: list[str]) -> _Layout:
    """Read the header, and hold its claims against the sizes of the files before anything large is read."""
    header_url, voxel_url = parts[0], parts[-1]
    raw = _bytes(header_url, _START_BYTES)
    layout = _parse(header_url, raw)
    _refuse_wrong_kind(header_url, layout, is_pair=len(parts) > 1)
    if voxel_url != header_url:
        raw = _bytes(voxel_url, _START_BYTES)
    size = _size(voxel_url)
    if size is not None:
        _refuse_impossible(voxel_url, size, _is_gzip(raw), layout)
    return layout


def _refuse_wrong_kind(url: str, layout: _Layout, *, is_pair: bool) -> None:
    if layout.is_single and is_pair:
        found = "is named like half of a pair, but its header is that of a single file"
        raise BadInput(url, found, "Name it .nii if its voxels are inside, or export it again")
    if not layout.is_single and not is_pair:
        found = "holds the header of a pair, whose voxels are in another file"
        raise BadInput(url, found, "Name the two files .hdr and .img, or export them as one .nii file")


def _refuse_impossible(url: str, size: int, is_gzip: bool, layout: _Layout) -> None:
    if not is_gzip:
        _refuse_excess(url, size, layout.end + SLACK_BYTES, layout)
        _refuse_shortage(url, size, layout)
        return
    # Bytes that do not compress grow by 5 in 16 KiB at worst (stored blocks): a thousandth is ample.
    most = layout.end + SLACK_BYTES
    _refuse_excess(url, size, most + most // 1000, layout)
    if size * _DEFLATE_MAX_RATIO < layout.end:
        found = f"{_claim(layout)}, more than {size} compressed bytes can hold"
        raise BadInput(url, found, _EXPORT_AGAIN)


def _claim(layout: _Layout) -> str:
    shape = " x ".join(str(count) for count in layout.header.shape)
    return f"its header describes {shape} voxels of {layout.header.dtype}, {layout.end} bytes in all"


def _refuse_excess(url: str, size: int, limit: int, layout: _Layout) -> None:
    if size > limit:
        found = f"{_claim(layout)}, but it holds at least {size} bytes"
        raise BadInput(url, found, "Export it again as one 3-D volume")


def _refuse_shortage(url: str, size: int, layout: _Layout) -> None:
    if size < layout.end:
        missing = "there are no voxels" if size <= layout.offset else "the voxels break off"
        raise BadInput(url, f"{_claim(layout)}, but it holds {size} bytes: {missing}", _EXPORT_AGAIN)


def _parse(url: str, raw: NDArray[np.uint8]) -> _Layout:
    if raw.size == 0:
        raise BadInput(url, "is empty (0 bytes)", _EXPORT_AGAIN)
    start = _start(url, raw)
    magic = start[4:8] if start[4:8] in (b"n+2\0", b"ni2\0") else start[344:348]
    _refuse_foreign(url, raw, start, magic)
    is_single = magic[1:2] == b"+"
    fields, byte_order = _fields(url, start, magic)
    voxel_type = _voxel_type(url, fields).newbyteorder(byte_order)
    slope, intercept = _scaling(url, fields)
    voxel_mm = [float(size) for size in fields["pixdim"][1:4]]
    orientation, affine_source = _geometry(fields)
    header = Header(
        shape=_shape(url, [int(size) for size in fields["dim"]]),
        dtype=voxel_type.name,
        is_big_endian=byte_order == ">",
        slope=slope,
        intercept=intercept,
        voxel_mm=(voxel_mm[0], voxel_mm[1], voxel_mm[2]),
        orientation=orientation,
        affine_source=affine_source,
    )
    smallest_offset = fields.itemsize + 4 if is_single else 0  # 4 bytes say whether extensions follow
    return _Layout(header, voxel_type, _offset(url, fields, smallest_offset), is_single)


def _refuse_foreign(url: str, raw: NDArray[np.uint8], start: bytes, magic: bytes) -> None:
    """Refuse what has no NIfTI magic, saying as well as can be told what it is instead."""
    if magic in (b"n+1\0", b"ni1\0", b"n+2\0", b"ni2\0"):
        return
    if url.lower().endswith(".gz") and not _is_gzip(raw):
        found = f"is named .gz, but its first bytes ({start[:4].hex(' ')}) are neither those of gzip nor of NIfTI"
        raise BadInput(url, found, _EXPORT_AGAIN)
    if len(start) < nifti1_layout.itemsize:
        raise BadInput(url, f"holds {len(start)} bytes, and a NIfTI header alone takes 348", _EXPORT_AGAIN)
    if start[:4] in (b"\x5c\x01\0\0", b"\0\0\x01\x5c"):  # 348 in either byte order
        found = "has an Analyze 7.5 header, without the magic of NIfTI"
        raise BadInput(url, found, "Convert it to NIfTI: Analyze leaves open which way its axes point")
    raise BadInput(url, "is no NIfTI file (it lacks the magic n+1, ni1, n+2 or ni2)", "Convert it to NIfTI")


def _fields(url: str, start: bytes, magic: bytes) -> tuple[np.void, Literal["<", ">"]]:
    """The header's fields, and its byte order ("<" or ">")."""
    layout = nifti2_layout if magic[2:3] == b"2" else nifti1_layout
    if len(start) < layout.itemsize:
        found = f"breaks off inside its header, after {len(start)} of {layout.itemsize} bytes"
        raise BadInput(url, found, _EXPORT_AGAIN)
    if magic[2:3] == b"2" and start[8:12] not in (b"\r\n\x1a\n", b"\0\0\0\0"):
        found = "was changed in transfer: the line ends in its header were translated"
        raise BadInput(url, found, "Copy it again in binary mode")
    little, big = (np.frombuffer(start, layout.newbyteorder(order), 1)[0] for order in ("<", ">"))
    if 1 <= int(little["dim"][0]) <= 7:
        return little, "<"
    if 1 <= int(big["dim"][0]) <= 7:
        return big, ">"
    named = big if int(big["sizeof_hdr"]) == layout.itemsize else little
    raise BadInput(url, f"says its array has {int(named['dim'][0])} dimensions, not 1 to 7", _EXPORT_AGAIN)


def _shape(url: str, dim: list[int]) -> tuple[int, int, int]:
    sizes = dim[1 : dim[0] + 1]
    text = " x ".join(str(size) for size in sizes)
    if min(sizes) < 1:
        raise BadInput(url, f"says its array is {text}, and no size may be below 1", _EXPORT_AGAIN)
    if len(sizes) == 1:
        raise BadInput(url, f"holds a 1-D array of {text} values", "Give a 2-D or 3-D volume")
    if math.prod(sizes[3:]) != 1:
        raise BadInput(url, f"holds a {len(sizes)}-D array, {text}", "Store one 3-D volume in each file")
    x, y, z = [*sizes, 1][:3]
    return x, y, z


def _voxel_type(url: str, fields: np.void) -> np.dtype[Any]:
    code = int(fields["datatype"])
    if code not in _VOXEL_TYPES:
        kind = _OTHER_TYPES.get(code, _OTHER_TYPES[0])
        found = f"has voxels that are {kind} (NIfTI datatype {code})"
        raise BadInput(url, found, "Store real numbers: 8 to 64-bit integers, float32 or float64")
    return np.dtype(_VOXEL_TYPES[code])


def _scaling(url: str, fields: np.void) -> tuple[float, float]:
    slope, intercept = float(fields["scl_slope"]), float(fields["scl_inter"])
    if slope == 0.0 or not math.isfinite(slope):
        return 1.0, 0.0
    if not math.isfinite(intercept):
        found = f"scales its values by scl_slope {slope:g} and scl_inter {intercept:g}"
        raise BadInput(url, found, "Store it with a finite scl_inter")
    return slope, intercept


def _offset(url: str, fields: np.void, smallest: int) -> int:
    offset = fields["vox_offset"].item()
    if not math.isfinite(offset) or offset < 0 or 0 < offset < smallest:
        found = f"says its voxels start at byte {offset:g} (vox_offset), and {smallest} is the first they can start at"
        raise BadInput(url, found, _EXPORT_AGAIN)
    return int(offset) or smallest


def _geometry(fields: np.void) -> tuple[str, str]:
    """Orientation and affine source, as in `Header`; whatever the fields hold."""
    has_sform, has_qform = (1 <= int(fields[code]) <= 5 for code in ("sform_code", "qform_code"))
    with np.errstate(all="ignore"):
        sform, qform = _sform(fields), _qform(fields)
        orientation = _axis_codes(sform if has_sform else qform) if has_sform or has_qform else ""
        if has_sform and has_qform:
            return orientation, "sform" if _agree(sform, qform) else "contradictory"
    return orientation, "sform" if has_sform else "qform" if has_qform else "none"


def _sform(fields: np.void) -> NDArray[np.float64]:
    return np.array([fields["srow_x"], fields["srow_y"], fields["srow_z"], (0, 0, 0, 1)], np.float64)


def _qform(fields: np.void) -> NDArray[np.float64]:
    """The affine of the quaternion, with the repairs of the format's reference code (`nifti_quatern_to_mat44`).

    Over-long quaternions are shortened, voxel sizes that are not positive count as 1, a negative `pixdim[0]` mirrors
    the third axis and any other value does not.
    """
    b, c, d = (float(fields[name]) for name in ("quatern_b", "quatern_c", "quatern_d"))
    square = b * b + c * c + d * d
    if square > 1.0 - 1e-7:
        b, c, d = (part / math.sqrt(square) for part in (b, c, d))
    a = math.sqrt(1.0 - square) if square <= 1.0 - 1e-7 else 0.0
    rotation = [
        [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
        [2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)],
        [2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - b * b - c * c],
    ]
    sizes = np.array([size if size > 0 else 1.0 for size in fields["pixdim"][1:4]], np.float64)
    sizes[2] *= -1.0 if fields["pixdim"][0] < 0 else 1.0
    affine = np.eye(4)
    affine[:3, :3] = np.array(rotation) * sizes
    affine[:3, 3] = [fields["qoffset_x"], fields["qoffset_y"], fields["qoffset_z"]]
    return affine


def _agree(sform: NDArray[np.float64], qform: NDArray[np.float64]) -> bool:
    difference = np.abs(sform - qform)[:3]
    sizes = np.sqrt(np.square(qform[:3, :3]).sum(axis=0))
    return bool((difference[:, :3] <= 1e-3 * sizes).all() and (difference[:, 3] <= 1e-3).all())


class _Orientations(Protocol):
    def aff2axcodes(self, aff: NDArray[np.float64]) -> tuple[str | None, ...]: ...


def _axis_codes(affine: NDArray[np.float64]) -> str:
    if not np.isfinite(affine).all():
        return ""
    try:
        codes = cast(_Orientations, nibabel.orientations).aff2axcodes(affine)
    except (np.linalg.LinAlgError, ValueError):  # finite, but not after squaring
        return ""
    return "".join(code or "" for code in codes) if None not in codes else ""


# The voxels


@dataclass(frozen=True, eq=False)
class _Voxels:
    """The stored voxels in file order, as stored, and the bytes they came from."""

    header: Header
    sha256: str
    byte_count: int
    stored: NDArray[Any]


def _read_voxels(url: str) -> _Voxels:
    parts = _parts(url)
    _layout(parts)  # nothing large is read before this
    hasher = hashlib.sha256()
    contents = [_bytes(part) for part in parts]
    for content in contents:
        hasher.update(content.data)
    # Parsed again: the header must be that of the bytes that were hashed, whatever happened to the file meanwhile.
    layout = _parse(parts[0], contents[0])
    byte_count = sum(content.size for content in contents)
    voxel_url, content = parts[-1], contents.pop()
    if _is_gzip(content):
        try:
            content = _decompress(voxel_url, content, layout)
        except BadInput:
            if layout.is_single or voxel_url.lower().endswith(".gz"):
                raise
    _refuse_shortage(voxel_url, content.size, layout)
    stored = content[layout.offset : layout.end].view(layout.voxel_type)
    return _Voxels(layout.header, hasher.hexdigest(), byte_count, stored)


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, start + _CHUNK_VOXELS) for start in range(0, count, _CHUNK_VOXELS))


def _true_values(stored: NDArray[Any], header: Header) -> NDArray[np.float64]:
    values = stored.astype(np.float64)
    if header.is_scaled:
        values *= header.slope
        values += header.intercept
    return values


def _as_scores(stored: NDArray[Any], header: Header) -> NDArray[np.float32]:
    if stored.dtype == np.float32 and not header.is_scaled and stored.flags.aligned and stored.flags.writeable:
        return stored
    values = np.empty(stored.size, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if not header.is_scaled and stored.dtype.name not in ("int64", "uint64"):
            values[:] = stored  # float64 holds all other types exactly: converting directly rounds as often
            return values
        for part in _chunks(stored.size):
            values[part] = _true_values(stored[part], header)
    return values


def _as_mask(url: str, stored: NDArray[Any], header: Header, labels: Sequence[int] | None) -> NDArray[np.bool_]:
    mask = np.empty(stored.size, np.bool_)
    if stored.dtype.kind in "iu" and not header.is_scaled:
        for part in _chunks(stored.size):
            mask[part] = _selected(stored[part], labels)
        return mask
    odd_count, example = 0, 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for part in _chunks(stored.size):
            values = _true_values(stored[part], header)
            whole = np.rint(values)
            odd = values[~(np.abs(values - whole) <= LABEL_TOLERANCE)]
            if odd.size and odd_count == 0:
                example = float(odd[0])
            odd_count += odd.size
            mask[part] = _selected(whole, labels)
    if odd_count:
        found = (
            f"should hold labels, but {odd_count} of {stored.size} values are not whole numbers, such as {example:g}"
        )
        raise BadInput(url, found, "Give a label map: neither probabilities nor interpolated masks")
    return mask


def _selected(values: NDArray[Any], labels: Sequence[int] | None) -> NDArray[np.bool_]:
    if labels is None:
        return values != 0
    selected = np.zeros(values.shape, np.bool_)
    for label in labels:
        selected |= values == label
    return selected
