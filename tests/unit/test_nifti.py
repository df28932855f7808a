"""NIfTI reading: what is read, and how everything else is refused."""

import gzip
import hashlib
import math
import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ingest.nifti import (
    SLACK_BYTES,
    Header,
    count_non_finite,
    digest,
    read_header,
    read_labels,
    read_scores,
)
from ingest.problems import BadInput

nib: Any = import_module("nibabel")
fsspec: Any = import_module("fsspec")

SCORES: NDArray[np.float32] = np.arange(24, dtype=np.float32).reshape(2, 3, 4) / np.float32(32)


def new_header(version: int = 1, order: str = "<") -> Any:
    header = (nib.Nifti1Header if version == 1 else nib.Nifti2Header)(endianness=order)
    header.set_data_dtype(np.float32)
    header.set_data_shape(SCORES.shape)
    header["vox_offset"] = 352 if version == 1 else 544
    return header


def file_bytes(header: Any, stored: NDArray[Any] = SCORES, gap: bytes = bytes(4)) -> bytes:
    voxels = stored.astype(header.get_data_dtype()).tobytes(order="F")
    return bytes(header.binaryblock) + gap + voxels


def with_fields(**fields: Any) -> bytes:
    header = new_header()
    for name, value in fields.items():
        header[name] = value
    return file_bytes(header)


def read_mask(url: str) -> NDArray[np.bool_]:
    return read_labels(url, None).mask


def refusal(read: Callable[[str], object], path: Path | str, blamed: Path | None = None) -> str:
    with pytest.raises(BadInput) as caught:
        read(str(path))
    assert caught.value.path == str(blamed or path)
    assert str(caught.value) == f"{caught.value.path}: {caught.value.found}. {caught.value.remedy}."
    return caught.value.found


def refused(folder: Path, content: bytes, name: str = "map.nii") -> str:
    """What scores, labels and (where it refuses too) the header are refused for: one message for all."""
    path = folder / name
    path.write_bytes(content)
    found = refusal(read_scores, path)
    assert refusal(read_mask, path) == found
    return found


def refused_by_header(folder: Path, content: bytes, name: str = "map.nii") -> str:
    found = refused(folder, content, name)
    assert refusal(read_header, folder / name) == found
    return found


def scores(path: Path, content: bytes) -> NDArray[np.float32]:
    path.write_bytes(content)
    return read_scores(str(path)).values


# What is read


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("name", ["map.nii", "map.nii.gz", "map.img", "map.hdr", "MAP.IMG", "map.hdr.gz", "map.img.gz"])
def test_every_container_gives_the_same_scores(tmp_path: Path, name: str, order: str, version: int) -> None:
    header = new_header(version, order)
    path = tmp_path / name
    if ".nii" in name:
        content = file_bytes(header)
        parts = [gzip.compress(content) if name.endswith(".gz") else content]
        path.write_bytes(parts[0])
    else:
        header["vox_offset"], header["magic"] = 0, f"ni{version}".encode()
        parts = [bytes(header.binaryblock), file_bytes(header)[header.sizeof_hdr + 4 :]]
        parts = [gzip.compress(part) for part in parts] if name.endswith(".gz") else parts
        for half, part in zip(("hdr", "img"), parts, strict=True):
            half_name = f"{'MAP' if name.isupper() else 'map'}.{half.upper() if name.isupper() else half}"
            (tmp_path / f"{half_name}{'.gz' if name.endswith('.gz') else ''}").write_bytes(part)

    volume = read_scores(str(path))

    np.testing.assert_array_equal(volume.values, SCORES)
    assert volume.header == read_header(str(path))
    assert volume.header.dtype == "float32"
    assert volume.header.is_big_endian == (order == ">")
    whole = b"".join(parts)
    assert (volume.sha256, volume.byte_count) == (hashlib.sha256(whole).hexdigest(), len(whole))
    assert digest(str(path)) == (volume.sha256, volume.byte_count)


def test_files_written_by_nibabel(tmp_path: Path) -> None:
    affine = np.diag([-1.0, 2.0, 3.0, 1.0])
    for path in (tmp_path / "map.nii", tmp_path / "map.nii.gz", tmp_path / "other.img"):
        kind = nib.Nifti1Pair if path.suffix == ".img" else nib.Nifti1Image
        nib.save(kind(SCORES, affine), path)
        volume = read_scores(str(path))
        np.testing.assert_array_equal(volume.values, np.asanyarray(nib.load(path).dataobj))
        assert volume.header == Header((2, 3, 4), "float32", False, 1.0, 0.0, (1.0, 2.0, 3.0), "LAS", "sform")
        assert volume.header.header_voxel_mm3 == 6.0


def test_a_pair_of_which_one_half_is_compressed(tmp_path: Path) -> None:
    nib.save(nib.Nifti1Pair(SCORES, np.eye(4)), tmp_path / "map.img")
    plain = (tmp_path / "map.img").read_bytes()
    (tmp_path / "map.img").unlink()
    (tmp_path / "map.img.gz").write_bytes(gzip.compress(plain))
    np.testing.assert_array_equal(read_scores(str(tmp_path / "map.hdr")).values, SCORES)
    np.testing.assert_array_equal(read_scores(str(tmp_path / "map.img.gz")).values, SCORES)


def test_voxels_of_a_pair_may_begin_like_gzip(tmp_path: Path) -> None:
    stored = np.array([0x1F, 0x8B, 8, 0, 1, 2], np.uint8).reshape(1, 2, 3, order="F")
    nib.save(nib.Nifti1Pair(stored, np.eye(4)), tmp_path / "map.img")
    np.testing.assert_array_equal(read_scores(str(tmp_path / "map.img")).values, stored)
    packed = gzip.compress((tmp_path / "map.img").read_bytes())
    (tmp_path / "map.img").write_bytes(packed)
    np.testing.assert_array_equal(read_scores(str(tmp_path / "map.img")).values, stored)
    (tmp_path / "map.img").rename(tmp_path / "map.img.gz")
    (tmp_path / "map.img.gz").write_bytes(packed[:-1])
    found = refusal(read_scores, tmp_path / "map.hdr", blamed=tmp_path / "map.img.gz")
    assert found == f"its gzip stream breaks off after {len(packed) - 1} bytes"


def test_compression_is_told_from_the_content(tmp_path: Path) -> None:
    content = file_bytes(new_header())
    np.testing.assert_array_equal(scores(tmp_path / "plain.nii.gz", content), SCORES)
    np.testing.assert_array_equal(scores(tmp_path / "compressed.nii", gzip.compress(content)), SCORES)
    np.testing.assert_array_equal(scores(tmp_path / "no_suffix", gzip.compress(content)), SCORES)


def test_urls(tmp_path: Path) -> None:
    content = file_bytes(new_header())
    memory = fsspec.filesystem("memory")
    for name, stored in (("map.nii", content), ("map.nii.gz", gzip.compress(content))):
        memory.pipe_file(f"/nifti/{name}", stored)
        volume = read_scores(f"memory://nifti/{name}")
        np.testing.assert_array_equal(volume.values, SCORES)
        assert volume.values.flags.writeable
        assert volume.sha256 == hashlib.sha256(stored).hexdigest()
        assert digest(f"memory://nifti/{name}") == (volume.sha256, len(stored))
        assert read_header(f"memory://nifti/{name}") == volume.header
    (tmp_path / "map.nii").write_bytes(content)
    np.testing.assert_array_equal(read_scores(f"file://{tmp_path}/map.nii").values, SCORES)


@pytest.mark.parametrize("dtype", ["float32", ">f4", "uint8", "int16", "float64", "int64"])
@pytest.mark.parametrize("offset", [352, 353, 400])
@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_arrays_are_uniform_whatever_was_stored(
    tmp_path: Path, dtype: str, offset: int, compress: Callable[[bytes], bytes]
) -> None:
    stored = np.arange(24).reshape(2, 3, 4)
    header = new_header(order=">" if dtype.startswith(">") else "<")
    header.set_data_dtype(np.dtype(dtype))
    header["vox_offset"] = offset
    (tmp_path / "map.nii").write_bytes(compress(file_bytes(header, stored, bytes(offset - 348))))

    values = read_scores(str(tmp_path / "map.nii")).values
    mask = read_labels(str(tmp_path / "map.nii"), [3, 5]).mask

    assert values.dtype == np.float32 and values.dtype.isnative
    assert mask.dtype == np.bool_
    for array in (values, mask):
        assert array.flags.f_contiguous and array.flags.aligned and array.flags.writeable
    np.testing.assert_array_equal(values, stored.astype(np.float32))
    np.testing.assert_array_equal(mask, (stored == 3) | (stored == 5))


def test_voxels_behind_header_extensions(tmp_path: Path) -> None:
    image = nib.Nifti1Image(SCORES, np.eye(4))
    image.header.extensions.append(nib.nifti1.Nifti1Extension("comment", b"any" * 100))
    nib.save(image, tmp_path / "map.nii.gz")
    np.testing.assert_array_equal(read_scores(str(tmp_path / "map.nii.gz")).values, SCORES)


@pytest.mark.parametrize("version", [1, 2])
def test_an_unset_offset_is_the_end_of_the_header(tmp_path: Path, version: int) -> None:
    header = new_header(version)
    header["vox_offset"] = 0
    np.testing.assert_array_equal(scores(tmp_path / "map.nii", file_bytes(header)), SCORES)


def test_a_pair_may_have_an_offset(tmp_path: Path) -> None:
    header = new_header()
    header["vox_offset"], header["magic"] = 7, b"ni1"
    (tmp_path / "map.hdr").write_bytes(header.binaryblock)
    (tmp_path / "map.img").write_bytes(b"comment" + SCORES.tobytes(order="F"))
    np.testing.assert_array_equal(read_scores(str(tmp_path / "map.img")).values, SCORES)


@pytest.mark.parametrize(
    ("stored", "shape"), [((3, 4), (3, 4, 1)), ((2, 3, 4, 1), (2, 3, 4)), ((2, 3, 1, 1, 1, 1, 1), (2, 3, 1))]
)
def test_ranks_that_are_three_dimensional_at_heart(
    tmp_path: Path, stored: tuple[int, ...], shape: tuple[int, int, int]
) -> None:
    array = np.arange(math.prod(stored), dtype=np.float32).reshape(stored)
    nib.save(nib.Nifti1Image(array, np.eye(4)), tmp_path / "map.nii")
    volume = read_scores(str(tmp_path / "map.nii"))
    assert volume.header.shape == volume.values.shape == shape
    np.testing.assert_array_equal(volume.values, array.reshape(shape))


@pytest.mark.parametrize("slope", [0.0, math.nan, math.inf, -math.inf])
def test_a_slope_that_is_none_leaves_values_alone(tmp_path: Path, slope: float) -> None:
    np.testing.assert_array_equal(
        scores(tmp_path / "map.nii", with_fields(scl_slope=slope, scl_inter=math.nan)), SCORES
    )
    header = read_header(str(tmp_path / "map.nii"))
    assert (header.slope, header.intercept) == (1.0, 0.0)


def test_scaling_rounds_once(tmp_path: Path) -> None:
    header = new_header()
    header.set_data_dtype(np.uint8)
    header["scl_slope"], header["scl_inter"] = 1 / 255, 0
    stored = np.resize(np.arange(256, dtype=np.uint8), (2, 3, 4)) + 232
    values = scores(tmp_path / "map.nii", file_bytes(header, stored.astype(np.uint8)))
    slope = float(np.float32(1 / 255))
    np.testing.assert_array_equal(values, (stored.astype(np.uint8) * slope).astype(np.float32))
    assert values.max() == 1.0


def test_64_bit_integers_go_through_float64(tmp_path: Path) -> None:
    header = new_header()
    header.set_data_dtype(np.int64)
    # Half a float32 step and one more: float64 drops the one, and the tie goes to the even neighbour below.
    stored = np.full((2, 3, 4), 2**60 + 2**36 + 1)
    values = scores(tmp_path / "map.nii", file_bytes(header, stored))
    np.testing.assert_array_equal(values, np.float32(2**60))


def test_non_finite_scores_are_kept_and_counted(tmp_path: Path) -> None:
    stored = SCORES.copy()
    stored[0, 0, :3] = [np.nan, np.inf, -np.inf]
    values = scores(tmp_path / "map.nii", file_bytes(new_header(), stored))
    np.testing.assert_array_equal(values, stored)
    assert count_non_finite(values) == 3
    assert count_non_finite(SCORES) == 0
    assert count_non_finite(np.empty((0, 2, 2), np.float32)) == 0


def test_float64_beyond_float32_becomes_infinite(tmp_path: Path) -> None:
    header = new_header()
    header.set_data_dtype(np.float64)
    values = scores(tmp_path / "map.nii", file_bytes(header, np.full((2, 3, 4), 1e300)))
    assert count_non_finite(values) == 24


# Labels


def test_labels_that_scaling_moved_are_rounded(tmp_path: Path) -> None:
    header = new_header()
    header.set_data_dtype(np.int16)
    header["scl_slope"] = 0.9999
    stored = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    (tmp_path / "mask.nii").write_bytes(file_bytes(header, stored))
    np.testing.assert_array_equal(read_labels(str(tmp_path / "mask.nii"), None).mask, stored != 0)
    np.testing.assert_array_equal(read_labels(str(tmp_path / "mask.nii"), [23, 300]).mask, stored == 23)
    assert not read_labels(str(tmp_path / "mask.nii"), []).mask.any()


@pytest.mark.parametrize(
    ("value", "example"), [(0.25, "0.25"), (math.nan, "nan"), (-math.inf, "-inf"), (1.01005, "1.01005")]
)
def test_values_that_are_no_labels_are_refused(tmp_path: Path, value: float, example: str) -> None:
    stored = np.ones((2, 3, 4), np.float32)
    stored[1, 2, 2:] = value
    path = tmp_path / "mask.nii"
    path.write_bytes(file_bytes(new_header(), stored))
    found = refusal(read_mask, path)
    assert found == f"should hold labels, but 2 of 24 values are not whole numbers, such as {example}"


def test_values_just_inside_the_tolerance_are_labels(tmp_path: Path) -> None:
    stored = np.full((2, 3, 4), 0.9901, np.float32)
    stored[0] = 0.0099
    (tmp_path / "mask.nii").write_bytes(file_bytes(new_header(), stored))
    np.testing.assert_array_equal(read_labels(str(tmp_path / "mask.nii"), None).mask, stored > 0.5)


# Refusals: the file


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "map.nii.gz"
    for read in (read_header, read_scores, digest):
        assert refusal(read, path) == "no such file"
    assert refusal(read_mask, "memory://nifti/none.nii") == "no such file"


def test_folder_and_other_irregular_files(tmp_path: Path) -> None:
    folder, pipe = tmp_path / "map.nii", tmp_path / "pipe.nii"
    folder.mkdir()
    os.mkfifo(pipe)
    for read in (read_header, read_scores, digest):
        assert refusal(read, folder) == "is a folder, not a file"
        assert refusal(read, pipe) == "is no regular file"


def test_paths_that_cannot_be_opened() -> None:
    for url in ("nul\0.nii", "nosuchprotocol://host/map.nii"):
        assert refusal(read_scores, url).startswith("cannot be read (ValueError: ")


def test_half_a_pair(tmp_path: Path) -> None:
    for half, other in (("hdr", "img"), ("img", "hdr")):
        path = tmp_path / f"{half}_only.{half}.gz"
        path.write_bytes(b"any")
        expected = f"is half of a pair, and {tmp_path}/{half}_only.{other}.gz is missing"
        assert refusal(read_scores, path) == expected
        assert refusal(digest, path) == expected


def test_single_file_and_pair_confused(tmp_path: Path) -> None:
    content = file_bytes(new_header())
    (tmp_path / "map.img").write_bytes(content)
    expected = "is named like half of a pair, but its header is that of a single file"
    assert refused_by_header(tmp_path, content, "map.hdr") == expected
    expected = "holds the header of a pair, whose voxels are in another file"
    assert refused_by_header(tmp_path, with_fields(magic=b"ni1")) == expected


def test_empty_file(tmp_path: Path) -> None:
    for name in ("map.nii", "map.nii.gz"):
        assert refused_by_header(tmp_path, b"", name) == "is empty (0 bytes)"
    assert digest(str(tmp_path / "map.nii")) == (hashlib.sha256(b"").hexdigest(), 0)
    fsspec.filesystem("memory").pipe_file("/nifti/empty.nii", b"")
    assert refusal(read_scores, "memory://nifti/empty.nii") == "is empty (0 bytes)"


def test_neither_gzip_nor_nifti(tmp_path: Path) -> None:
    expected = "is named .gz, but its first bytes (50 4b 03 04) are neither those of gzip nor of NIfTI"
    assert refused_by_header(tmp_path, b"PK\3\4" + bytes(1000), "map.nii.gz") == expected
    assert refused_by_header(tmp_path, b"PK\3\4", "map.nii.gz") == expected
    expected = "is no NIfTI file (it lacks the magic n+1, ni1, n+2 or ni2)"
    assert refused_by_header(tmp_path, b"PK\3\4" + bytes(1000)) == expected
    assert refused_by_header(tmp_path, gzip.compress(bytes(1000)), "map.nii.gz") == expected
    assert refused_by_header(tmp_path, with_fields(magic=b"n+9")).startswith("has an Analyze 7.5 header")


@pytest.mark.parametrize("order", ["<", ">"])
def test_analyze(tmp_path: Path, order: str) -> None:
    header = nib.AnalyzeHeader(endianness=order)
    header.set_data_shape((2, 3, 4))
    (tmp_path / "map.img").write_bytes(bytes(96))
    expected = "has an Analyze 7.5 header, without the magic of NIfTI"
    assert refused_by_header(tmp_path, header.binaryblock, "map.hdr") == expected


def test_short_headers(tmp_path: Path) -> None:
    content = file_bytes(new_header())
    expected = "holds 100 bytes, and a NIfTI header alone takes 348"
    assert refused_by_header(tmp_path, content[:100]) == expected
    assert refused_by_header(tmp_path, gzip.compress(content[:100]), "map.nii.gz") == expected
    content = file_bytes(new_header(2))[:400]
    assert refused_by_header(tmp_path, content) == "breaks off inside its header, after 400 of 540 bytes"


def test_translated_line_ends(tmp_path: Path) -> None:
    header = new_header(2)
    header["eol_check"] = (10, 26, 10, 0)
    expected = "was changed in transfer: the line ends in its header were translated"
    assert refused_by_header(tmp_path, file_bytes(header)) == expected


# Refusals: the header


@pytest.mark.parametrize(("rank", "order"), [(0, "<"), (8, "<"), (-1, ">"), (9, ">")])
def test_impossible_ranks(tmp_path: Path, rank: int, order: str) -> None:
    header = new_header(order=order)
    header["dim"][0] = rank
    assert refused_by_header(tmp_path, file_bytes(header)) == f"says its array has {rank} dimensions, not 1 to 7"


@pytest.mark.parametrize("size", [0, -1, -32768])
def test_impossible_sizes(tmp_path: Path, size: int) -> None:
    found = refused_by_header(tmp_path, with_fields(dim=(3, 2, size, 4, 1, 1, 1, 1)))
    assert found == f"says its array is 2 x {size} x 4, and no size may be below 1"


def test_wrong_ranks(tmp_path: Path) -> None:
    found = refused_by_header(tmp_path, with_fields(dim=(1, 24, 1, 1, 1, 1, 1, 1)))
    assert found == "holds a 1-D array of 24 values"
    found = refused_by_header(tmp_path, with_fields(dim=(4, 2, 3, 2, 2, 1, 1, 1)))
    assert found == "holds a 4-D array, 2 x 3 x 2 x 2"
    found = refused_by_header(tmp_path, with_fields(dim=(5, 2, 3, 2, 1, 2, 1, 1)))
    assert found == "holds a 5-D array, 2 x 3 x 2 x 1 x 2"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (0, "of unknown type"),
        (1, "single bits"),
        (32, "complex (complex64)"),
        (128, "RGB colours"),
        (1536, "float128"),
        (1792, "complex (complex128)"),
        (2048, "complex (complex256)"),
        (2304, "RGBA colours"),
        (777, "of unknown type"),
    ],
)
def test_voxel_types_that_are_no_scores(tmp_path: Path, code: int, kind: str) -> None:
    content = bytearray(file_bytes(new_header()))
    content[70:72] = struct.pack("<h", code)
    found = refused_by_header(tmp_path, bytes(content))
    assert found == f"has voxels that are {kind} (NIfTI datatype {code})"


def test_an_intercept_without_value(tmp_path: Path) -> None:
    found = refused_by_header(tmp_path, with_fields(scl_slope=2, scl_inter=math.nan))
    assert found == "scales its values by scl_slope 2 and scl_inter nan"


@pytest.mark.parametrize("offset", [1, 100, 351, -5, math.nan, math.inf])
def test_offsets_inside_the_header(tmp_path: Path, offset: float) -> None:
    found = refused_by_header(tmp_path, with_fields(vox_offset=offset))
    assert found == f"says its voxels start at byte {offset:g} (vox_offset), and 352 is the first they can start at"


# Refusals: the voxels


def test_missing_voxels(tmp_path: Path) -> None:
    content = file_bytes(new_header())
    claim = "its header describes 2 x 3 x 4 voxels of float32, 448 bytes in all, but it holds"
    assert refused_by_header(tmp_path, content[:-1]) == f"{claim} 447 bytes: the voxels break off"
    assert refused_by_header(tmp_path, content[:352]) == f"{claim} 352 bytes: there are no voxels"
    for size, ending in ((447, "the voxels break off"), (352, "there are no voxels")):
        assert refused(tmp_path, gzip.compress(content[:size]), "map.nii.gz") == f"{claim} {size} bytes: {ending}"


def test_missing_voxels_in_a_pair(tmp_path: Path) -> None:
    nib.save(nib.Nifti1Pair(SCORES, np.eye(4)), tmp_path / "map.img")
    image = tmp_path / "map.img"
    image.write_bytes(image.read_bytes()[:-4])
    expected = "its header describes 2 x 3 x 4 voxels of float32, 96 bytes in all, but it holds 92 bytes: "
    for read in (read_header, read_scores):
        assert refusal(read, tmp_path / "map.hdr", blamed=image) == f"{expected}the voxels break off"


def test_damaged_gzip(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).random((20, 20, 20), dtype=np.float32)
    header = new_header()
    header.set_data_shape(noise.shape)
    packed = gzip.compress(file_bytes(header, noise))
    for size in (len(packed) - 1, len(packed) - 8, len(packed) // 2):
        found = refused(tmp_path, packed[:size], "map.nii.gz")
        assert found == f"its gzip stream breaks off after {size} bytes"
        assert read_header(str(tmp_path / "map.nii.gz")).shape == noise.shape
    wrong_checksum = packed[:-8] + bytes([packed[-8] ^ 1]) + packed[-7:]
    assert refused(tmp_path, wrong_checksum, "map.nii.gz") == "its gzip stream is damaged: its checksum does not match"
    wrong_length = packed[:-4] + struct.pack("<I", 5)
    assert refused(tmp_path, wrong_length, "map.nii.gz") == "its gzip stream is damaged: incorrect length check"
    second_damaged = packed + packed[:20]
    assert "breaks off" in refused(tmp_path, second_damaged, "map.nii.gz")
    no_stream = packed[:10] + b"\xff" * 1000
    assert "its gzip stream is damaged: invalid block type" in refused_by_header(tmp_path, no_stream, "map.nii.gz")


def test_trailing_bytes_are_ignored_up_to_a_limit(tmp_path: Path) -> None:
    content = file_bytes(new_header())
    np.testing.assert_array_equal(scores(tmp_path / "map.nii", content + bytes(SLACK_BYTES)), SCORES)
    np.testing.assert_array_equal(scores(tmp_path / "map.nii", gzip.compress(content + bytes(SLACK_BYTES))), SCORES)
    for garbage in (b"garbage", bytes(512), b"\x1f"):
        np.testing.assert_array_equal(scores(tmp_path / "map.nii.gz", gzip.compress(content) + garbage), SCORES)
    claim = "its header describes 2 x 3 x 4 voxels of float32, 448 bytes in all, but it holds at least"
    too_much = content + bytes(SLACK_BYTES + 1)
    assert refused_by_header(tmp_path, too_much) == f"{claim} {len(too_much)} bytes"
    assert refused(tmp_path, gzip.compress(too_much), "map.nii.gz").startswith(claim)
    assert refused_by_header(tmp_path, gzip.compress(content) + bytes(2 * SLACK_BYTES), "map.nii.gz").startswith(claim)


def test_several_gzip_members(tmp_path: Path) -> None:
    content = file_bytes(new_header())
    for cut in (1, 100, 348, 352, 400):
        packed = gzip.compress(content[:cut]) + gzip.compress(b"") + gzip.compress(content[cut:])
        np.testing.assert_array_equal(scores(tmp_path / "map.nii.gz", packed), SCORES)
    # The last member's length happens to fit the header, the first member's does not.
    packed = gzip.compress(content[:400]) + gzip.compress(content[400:] + bytes(448))
    np.testing.assert_array_equal(scores(tmp_path / "map.nii.gz", packed), SCORES)


def peak_bytes(task: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        task()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_no_claim_is_believed_before_it_is_checked(tmp_path: Path) -> None:
    huge = with_fields(dim=(3, 30000, 30000, 30000, 1, 1, 1, 1))
    medium = with_fields(dim=(3, 250, 250, 250, 1, 1, 1, 1))
    zeros = bytes(32 << 20)
    forged = gzip.compress(huge + bytes(10000))[:-4] + b"\xff\xff\xff\xff"
    cases = {
        "huge.nii": huge,
        "huge.nii.gz": gzip.compress(huge),
        "forged.nii.gz": forged,
        "huge_bomb.nii.gz": gzip.compress(huge + zeros),
        "medium_bomb.nii.gz": gzip.compress(medium + zeros),
        "small_bomb.nii.gz": gzip.compress(file_bytes(new_header()) + zeros),
        "forged_bomb.nii.gz": gzip.compress(file_bytes(new_header()) + zeros)[:-4] + struct.pack("<I", 448),
    }

    def refuse_all() -> None:
        for name, content in cases.items():
            assert "its header describes " in refused(tmp_path, content, name), name

    assert peak_bytes(refuse_all) < 8 << 20
    huge_claim = "its header describes 30000 x 30000 x 30000 voxels of float32, 108000000000352 bytes in all"
    assert (
        refused_by_header(tmp_path, huge, "huge.nii")
        == f"{huge_claim}, but it holds {len(huge)} bytes: the voxels break off"
    )
    packed = gzip.compress(huge)
    expected = f"{huge_claim}, more than {len(packed)} compressed bytes can hold"
    assert refused_by_header(tmp_path, packed, "huge.nii.gz") == expected


@pytest.mark.parametrize(
    ("dtype", "slope", "times"),
    [("float32", 1, 2.2), ("float64", 1, 4), ("uint16", 1 / 65535, 2.5), ("int64", 2, 4), (">f4", 1, 3.2)],
)
def test_memory_stays_below_four_times_the_scores(tmp_path: Path, dtype: str, slope: float, times: float) -> None:
    shape = (120, 120, 60)
    stored = np.random.default_rng(0).integers(0, 50, shape)
    header = new_header(order=">" if dtype.startswith(">") else "<")
    header.set_data_dtype(np.dtype(dtype))
    header.set_data_shape(shape)
    header["scl_slope"] = slope
    (tmp_path / "map.nii.gz").write_bytes(gzip.compress(file_bytes(header, stored), 1))
    assert peak_bytes(lambda: read_scores(str(tmp_path / "map.nii.gz"))) < times * 4 * stored.size


# Geometry is recorded, never obeyed


def test_orientation_and_source(tmp_path: Path) -> None:
    path = tmp_path / "map.nii"
    affine = np.array([[0, 2.0, 0, 5], [-1, 0, 0, 6], [0, 0, 3, 7], [0, 0, 0, 1]])

    def saved(sform: Any, sform_code: int, qform: Any, qform_code: int) -> Header:
        image = nib.Nifti1Image(SCORES, None)
        image.set_sform(sform, sform_code)
        image.set_qform(qform, qform_code)
        nib.save(image, path)
        return read_header(str(path))

    def found(*arguments: Any) -> tuple[str, str]:
        header = saved(*arguments)
        return header.orientation, header.affine_source

    assert found(affine, 1, np.eye(4), 0) == ("PRS", "sform")
    assert found(np.eye(4), 0, affine, 2) == ("PRS", "qform")
    assert found(affine, 1, affine, 1) == ("PRS", "sform")
    assert found(affine, 0, affine, 0) == ("", "none")
    assert found(affine, 1, np.eye(4), 1) == ("PRS", "contradictory")
    for shift, source in ((0.0009, "sform"), (0.0011, "contradictory")):
        moved, stretched = affine.copy(), affine.copy()
        moved[2, 3] += shift
        stretched[:3, 2] *= 1 + shift
        assert found(moved, 1, affine, 1) == found(stretched, 1, affine, 1) == ("PRS", source)


@pytest.mark.parametrize("size", [0.0, math.nan, math.inf])
def test_no_voxel_volume_without_voxel_sizes(tmp_path: Path, size: float) -> None:
    (tmp_path / "map.nii").write_bytes(with_fields(pixdim=(1, 2, size, 3, 0, 0, 0, 0)))
    header = read_header(str(tmp_path / "map.nii"))
    np.testing.assert_array_equal(header.voxel_mm, (2.0, size, 3.0))
    assert header.header_voxel_mm3 is None


@pytest.mark.parametrize("version", [1, 2])
def test_odd_geometry_is_recorded_in_silence(tmp_path: Path, capfd: pytest.CaptureFixture[str], version: int) -> None:
    header = new_header(version)
    header["pixdim"] = (0.5, -2, -3, -4, math.nan, 0, 0, 0)
    header["qform_code"], header["sform_code"] = 2, 77
    header["quatern_b"], header["quatern_c"], header["quatern_d"] = 9, 9, 9
    header["sizeof_hdr"], header["bitpix"] = 5, 3
    np.testing.assert_array_equal(scores(tmp_path / "map.nii", file_bytes(header)), SCORES)
    read = read_header(str(tmp_path / "map.nii"))
    assert (read.voxel_mm, read.header_voxel_mm3, read.affine_source) == ((-2.0, -3.0, -4.0), 24.0, "qform")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("row", [(0, 0, 0, 0), (math.nan, 1, 1, 1), (1e200, 1e200, 0, 0)])
def test_a_degenerate_affine_has_no_orientation(tmp_path: Path, row: tuple[float, ...]) -> None:
    header = new_header(2)
    header["sform_code"] = 1
    header["srow_x"] = header["srow_y"] = header["srow_z"] = row
    (tmp_path / "map.nii").write_bytes(file_bytes(header))
    read = read_header(str(tmp_path / "map.nii"))
    assert (read.orientation, read.affine_source) == ("", "sform")


# The exception


def test_bad_input_crosses_process_borders_unchanged() -> None:
    problem = BadInput("a/map.nii", "is empty (0 bytes)", "Copy it again")
    copy = pickle.loads(pickle.dumps(problem))
    assert type(copy) is BadInput
    assert (copy.path, copy.found, copy.remedy) == ("a/map.nii", "is empty (0 bytes)", "Copy it again")
    assert str(copy) == str(problem) == "a/map.nii: is empty (0 bytes). Copy it again."
    with pytest.raises(AttributeError):
        problem.__setattr__("path", "other")
