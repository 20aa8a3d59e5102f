import numpy as np
from numpy.typing import NDArray

class NativeError(RuntimeError): ...

def copy_batch(
    dst: NDArray[np.uint64],
    src: NDArray[np.uint64],
    size: NDArray[np.uint64],
    threads: int = 1,
) -> int: ...
