"""NumPy array types of the disk tier."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]
Uint32s = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]
