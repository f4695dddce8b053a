"""Writes .bin/.idx pairs from ids that a test makes up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from pretrainkit.data.indexed.format import bin_path, idx_path, write_header, write_index_tail
from pretrainkit.errors import DataError
from pretrainkit.files import temporary_name


def write_index(
    path: Path,
    dtype: np.dtype,
    sequence_lengths: NDArray[np.int32],
    document_indices: NDArray[np.int64] | None = None,
) -> None:
    """Write an .idx to `path`.

    Without `document_indices` every sequence is a document.
    """
    num_sequences = len(sequence_lengths)
    num_documents = num_sequences if document_indices is None else len(document_indices) - 1
    with path.open("wb") as file:
        write_header(file, dtype, num_sequences, num_documents)
        file.write(np.ascontiguousarray(sequence_lengths, dtype=np.int32).data)
        write_index_tail(file, sequence_lengths, dtype.itemsize, document_indices)


class IndexedDatasetWriter:
    """Writes a pair document by document; both files appear when the `with` block ends without an error."""

    def __init__(self, prefix: Path | str, dtype: np.dtype) -> None:
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype)
        self._final = (bin_path(prefix), idx_path(prefix))
        self._temporary = tuple(temporary_name(path) for path in self._final)
        self._lengths: list[int] = []
        self._document_indices = [0]

    def __enter__(self) -> IndexedDatasetWriter:
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._temporary[0].open("wb")
        return self

    def add_document(self, ids: Sequence[int] | NDArray, lengths: Sequence[int] | None = None) -> None:
        """Append a document of one sequence, or of several whose lengths are given.

        Raises DataError when an id doesn't fit in the dtype.
        """
        array = np.asarray(ids)
        limits = np.iinfo(self.dtype)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise DataError(
                f"token id {int(array.max())} does not fit in {self.dtype}",
                where=f"document {len(self._document_indices) - 1} of {self.prefix}",
            )
        self._file.write(np.ascontiguousarray(array, dtype=self.dtype).data)
        self._lengths += [array.size] if lengths is None else list(lengths)
        self._document_indices.append(len(self._lengths))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        try:
            if kind is None:
                indices = np.asarray(self._document_indices, dtype=np.int64)
                write_index(self._temporary[1], self.dtype, np.asarray(self._lengths, dtype=np.int32), indices)
                self._temporary[0].replace(bin_path(self.prefix))
                self._temporary[1].replace(idx_path(self.prefix))
        finally:
            for path in self._temporary:
                path.unlink(missing_ok=True)
