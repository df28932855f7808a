"""NIfTI reading against nibabel, against a twin of plain Python numbers, and against arbitrary damage."""

import gzip
import math
import tempfile
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ingest.nifti import LABEL_TOLERANCE, Volume, read_header, read_labels, read_scores
from ingest.problems import BadInput

nib: Any = import_module("nibabel")

DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
SLOPES = st.sampled_from([0.0, 1.0, -1.0, 1 / 255, 0.9999, 3e38, math.nan]) | st.floats(width=32, allow_nan=False)
INTERCEPTS = st.sampled_from([0.0, 1.0, -0.5]) | st.floats(-1e6, 1e6, width=32)
ORDERS: st.SearchStrategy[Literal["<", ">"]] = st.sampled_from(["<", ">"])
SHAPES = st.lists(st.integers(1, 4), min_size=2, max_size=3)
CONTAINERS = st.sampled_from([".nii", ".nii.gz", ".img", ".img.gz"])


def store(
    folder: str, stored: NDArray[Any], slope: float, intercept: float, container: str = ".nii", version: int = 1
) -> Path:
    """Write an array as it is, with a header made by nibabel; the path of the file (of a pair, the image)."""
    order = ">" if stored.dtype.byteorder == ">" else "<"
    header = (nib.Nifti1Header if version == 1 else nib.Nifti2Header)(endianness=order)
    header.set_data_dtype(stored.dtype)
    header.set_data_shape(stored.shape)
    header["scl_slope"], header["scl_inter"] = slope, intercept
    voxels = stored.tobytes(order="F")
    path = Path(folder) / f"map{container}"
    pack = gzip.compress if container.endswith(".gz") else bytes
    if ".img" in container:
        header["magic"] = f"ni{version}".encode()
        path.with_name(path.name.replace(".img", ".hdr")).write_bytes(pack(header.binaryblock))
        path.write_bytes(pack(voxels))
    else:
        header["vox_offset"] = header.sizeof_hdr + 4
        path.write_bytes(pack(bytes(header.binaryblock) + bytes(4) + voxels))
    return path


@st.composite
def arrays(draw: st.DrawFn) -> NDArray[Any]:
    """Arrays of any readable type and byte order, of any bits: NaN, infinities and extremes among them."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES))).newbyteorder(draw(ORDERS))
    shape = draw(SHAPES)
    size = math.prod(shape) * dtype.itemsize
    small = st.integers(0, 3).map(lambda number: np.full(math.prod(shape), number, dtype).tobytes())
    return np.frombuffer(draw(small | st.binary(min_size=size, max_size=size)), dtype).reshape(shape, order="F")


def true_value(stored: float, slope: float, intercept: float) -> float:
    """The definition, in Python's own float64 numbers."""
    slope, intercept = float(np.float32(slope)), float(np.float32(intercept))
    is_scaled = slope != 0 and math.isfinite(slope)
    return float(stored) * slope + intercept if is_scaled else float(stored)


@settings(deadline=None, max_examples=200)
@given(arrays(), SLOPES, INTERCEPTS, CONTAINERS, st.sampled_from([1, 2]))
def test_scores_are_those_of_the_definition_and_of_nibabel(
    stored: NDArray[Any], slope: float, intercept: float, container: str, version: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = store(folder, stored, slope, intercept, container, version)
        volume = read_scores(str(path))
        with np.errstate(all="ignore"):
            by_nibabel = np.asanyarray(nib.load(path).dataobj)
            expected = by_nibabel.astype(np.float64).astype(np.float32)

    assert volume.header.shape == (*stored.shape, 1)[:3]
    assert volume.header.dtype == stored.dtype.name
    assert volume.header.is_big_endian == (stored.dtype.byteorder == ">" and stored.dtype.itemsize > 1)
    np.testing.assert_array_equal(volume.values, expected.reshape(volume.header.shape))
    if version == 1:
        with np.errstate(all="ignore"):
            twin = [np.float32(true_value(value, slope, intercept)) for value in stored.ravel().tolist()]
        np.testing.assert_array_equal(volume.values.ravel(), np.array(twin, np.float32))


@st.composite
def label_maps(draw: st.DrawFn) -> NDArray[Any]:
    """Small labels, and in float types now and then a value beside them."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES))).newbyteorder(draw(ORDERS))
    shape = draw(SHAPES)
    values = st.integers(0, 5).map(float)
    if dtype.kind == "f":
        values |= st.sampled_from([0.001, 0.995, 1.5, 2.02, math.nan, math.inf])
    content = draw(st.lists(values, min_size=math.prod(shape), max_size=math.prod(shape)))
    return np.array(content).astype(dtype).reshape(shape)


@settings(deadline=None, max_examples=200)
@given(
    label_maps(),
    st.sampled_from([0.0, 1.0, 0.9999, 2.0, 0.5, -1.0]),
    st.sampled_from([0.0, 1.0, 0.005]),
    st.none() | st.lists(st.integers(-2, 300), max_size=3),
    CONTAINERS,
)
def test_labels_are_those_of_the_definition(
    stored: NDArray[Any], slope: float, intercept: float, labels: list[int] | None, container: str
) -> None:
    values = [true_value(value, slope, intercept) for value in stored.ravel().tolist()]
    odd = [value for value in values if not math.isfinite(value) or abs(value - round(value)) > LABEL_TOLERANCE]
    with tempfile.TemporaryDirectory() as folder:
        path = store(folder, stored, slope, intercept, container)
        if odd:
            with pytest.raises(BadInput, match=f"but {len(odd)} of {stored.size} values are not whole numbers"):
                read_labels(str(path), labels)
            return
        volume = read_labels(str(path), labels)
        assert (volume.header, volume.sha256) == (read_header(str(path)), read_scores(str(path)).sha256)
    expected = [round(value) != 0 if labels is None else round(value) in labels for value in values]
    np.testing.assert_array_equal(volume.mask.ravel(), np.array(expected))


@settings(deadline=None, max_examples=50)
@given(arrays(), st.lists(st.integers(0, 600), max_size=4), st.binary(max_size=40))
def test_members_and_trailing_bytes_change_nothing(stored: NDArray[Any], cuts: list[int], trailing: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = store(folder, stored, 1.0, 0.0)
        plain, content = read_scores(str(path)), path.read_bytes()
        bounds = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
        members = [gzip.compress(content[low:high]) for low, high in pairwise(bounds)]
        path.write_bytes(b"".join(members) + b"\0" + trailing)
        packed = read_scores(str(path))
    assert packed.header == plain.header or any(math.isnan(size) for size in plain.header.voxel_mm)
    np.testing.assert_array_equal(packed.values, plain.values)


def read_or_refuse(path: Path) -> Volume | None:
    try:
        return read_scores(str(path))
    except BadInput:
        return None


@settings(deadline=None, max_examples=200)
@given(
    arrays(),
    st.sampled_from([".nii", ".nii.gz"]),
    st.sampled_from([1, 2]),
    st.floats(0, 1),
    st.binary(min_size=1, max_size=8),
)
def test_damage_is_refused_or_read_but_never_raises_anything_else(
    stored: NDArray[Any], container: str, version: int, where: float, damage: bytes
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = store(folder, stored, 1.0, 0.0, container, version)
        content, undamaged = path.read_bytes(), read_scores(str(path)).values
        position = int(where * (len(content) - 1))

        path.write_bytes(content[:position])
        assert read_or_refuse(path) is None

        path.write_bytes(content[:position] + damage + content[position + len(damage) :])
        volume = read_or_refuse(path)
        if container == ".nii.gz" and volume is not None:
            np.testing.assert_array_equal(volume.values, undamaged)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from([1, 2]), st.binary(min_size=540, max_size=540))
def test_no_geometry_whatever_is_an_error(version: int, noise: bytes) -> None:
    header = (nib.Nifti1Header if version == 1 else nib.Nifti2Header)()
    odd = np.frombuffer(noise[: header.sizeof_hdr], header.structarr.dtype)[0]
    header.set_data_dtype(np.uint8)
    header.set_data_shape((1, 2, 1))
    header["vox_offset"] = header.sizeof_hdr + 4
    for name in ("pixdim", "quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z"):
        header[name] = odd[name]
    for name in ("srow_x", "srow_y", "srow_z", "xyzt_units", "descrip", "bitpix"):
        header[name] = odd[name] if name in odd.dtype.names else header[name]
    header["qform_code"], header["sform_code"] = noise[0] % 7, noise[1] % 7
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "map.nii"
        path.write_bytes(bytes(header.binaryblock) + bytes(4) + b"\1\2")
        volume = read_scores(str(path))
    np.testing.assert_array_equal(volume.values, [[[1], [2]]])
    assert volume.header.affine_source in ("sform", "qform", "none", "contradictory")


@settings(deadline=None, max_examples=100)
@given(
    st.permutations(range(3)),
    st.tuples(*[st.floats(0.1, 5)] * 3),
    st.tuples(*[st.sampled_from([-1, 1])] * 3),
    st.tuples(*[st.floats(-0.5, 0.5)] * 3),
    st.sampled_from(["sform", "qform"]),
)
def test_orientation_is_that_of_nibabel(
    order: list[int], sizes: tuple[float, ...], signs: tuple[int, ...], angles: tuple[float, ...], source: str
) -> None:
    rotation = nib.eulerangles.euler2mat(*angles)
    affine = np.eye(4)
    affine[:3, :3] = rotation @ (np.eye(3)[order] * signs) * sizes
    image = nib.Nifti1Image(np.zeros((2, 2, 2), np.uint8), None)
    image.set_sform(affine, int(source == "sform"))
    image.set_qform(affine, int(source == "qform"))
    both = nib.Nifti1Image(np.zeros((2, 2, 2), np.uint8), affine)
    both.set_qform(affine, 1)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "map.nii")
        nib.save(image, path)
        header, expected = read_header(path), nib.aff2axcodes(nib.load(path).affine)
        nib.save(both, path)
        assert read_header(path).affine_source == "sform"
    assert header.orientation == "".join(expected)
    assert header.affine_source == source
    np.testing.assert_allclose(header.voxel_mm, sizes, rtol=1e-6)
