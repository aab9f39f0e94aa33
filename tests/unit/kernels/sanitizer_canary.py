"""Makes a kernel read behind its memory: under the address sanitizer this must not come to its end.

Run by scripts/sanitized-tests, never collected.  The array is a lie that NumPy can be made to tell.
"""

from __future__ import annotations

import numpy as np

from penstock.kernels import _native

real = np.zeros(4096, np.uint32)
too_long = np.lib.stride_tricks.as_strided(real, shape=(8192,))
_native.Kernels("portable", "fp32").read_cells(too_long)
