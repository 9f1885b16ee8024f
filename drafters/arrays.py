"""Arrays as the compiled loops take them: checked, contiguous, of one dtype, and growing."""

from collections.abc import Sequence

import numpy as np

GROWTH = 1.5  # of an array that is full


def aligned_rows(rows: int, width: int) -> np.ndarray:
    """An uninitialised int32 [rows, width] at the start of a cache line: no state lies across two."""
    raw = np.empty(rows * width + 16, np.int32)
    offset = -(raw.ctypes.data // 4) % 16
    return raw[offset : offset + rows * width].reshape(rows, width)


def vector(values: np.ndarray, name: str, dtype: type, size: int | None = None) -> np.ndarray:
    """A one-dimensional contiguous array of the dtype, of `size` entries if given."""
    array = np.asarray(values)
    if array.ndim != 1 or (size is not None and len(array) != size):
        expected = "[B]" if size is None else f"[{size}]"
        raise ValueError(f"{name}: shape {list(array.shape)}, expected {expected}")
    return cast(array, name, dtype)


def cast(array: np.ndarray, name: str, dtype: type) -> np.ndarray:
    """The array as the kernels are compiled for it: of the dtype, contiguous, writeable (JAX's are not)."""
    if array.dtype == dtype:
        return array if array.flags.c_contiguous and array.flags.writeable else array.copy(order="C")
    if np.issubdtype(dtype, np.integer) and array.size:
        limits = np.iinfo(dtype)
        if not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{name}: {array.dtype}, expected {np.dtype(dtype)}")
        if array.min() < limits.min or array.max() > limits.max:
            raise ValueError(f"{name}: entries do not fit {np.dtype(dtype)}")
    return np.array(array, dtype, order="C")


def padded(sequences: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Token lists as rows padded with 0, int32 [n, T] with T at least 1, and their lengths, int32 [n]."""
    lengths = np.asarray([len(tokens) for tokens in sequences], np.int32)
    rows = np.zeros((len(sequences), max(1, int(lengths.max(initial=0)))), np.int32)
    for row, tokens in zip(rows, sequences, strict=True):
        row[: len(tokens)] = tokens
    return rows, lengths


def with_room(array: np.ndarray, size: int) -> np.ndarray:
    """The array, or a larger copy that holds `size` entries."""
    if size <= len(array):
        return array
    larger = np.empty((max(size, int(len(array) * GROWTH)), *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


def check_ids(ids: np.ndarray, known: int, name: str) -> None:
    wrong = (ids < 0) | (ids >= known)
    if wrong.any():
        raise ValueError(f"{name}: {ids[wrong][0]} is not known, there are {known}")
