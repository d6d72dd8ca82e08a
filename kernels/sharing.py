"""This file finds what the rows of a decode step begin with in common: pages that attention may
read once for all of them. It runs on the host and knows no device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.batch import Ints

SHARING_ROWS_MIN = 16  # as SHARED_ROWS_MIN of graphs.py, in rows of the step
SHARING_LEN_MIN = 256  # tokens


@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """Rows of a decode step that begin with the same whole pages."""

    rows: NDArray[np.int64]
    length: int  # in tokens


def find_sharing(table: Ints, positions: Ints, page_size: int) -> Sharing | None:
    """The largest group with one first page, if it is worth a kernel of its own. A row's last page
    is never shared: it may be written."""
    pages, counts = np.unique(table[:, 0], return_counts=True)
    if counts.max() < SHARING_ROWS_MIN:
        return None
    rows = np.flatnonzero(table[:, 0] == pages[counts.argmax()])
    full = int(positions[rows].min()) // page_size
    same = (table[rows, :full] == table[rows[0], :full]).all(axis=0)
    length = (full if same.all() else int(same.argmin())) * page_size
    return Sharing(rows, length) if length >= SHARING_LEN_MIN else None
