"""``penstock`` as on a processor whose kernels decode in registers: ``python -m kept_compressed serve ...``.

Weights stay compressed, every matrix gains by a decoded copy, and measuring has time enough on a busy machine.
"""

import os
import sys
from functools import partial
from typing import Any

from penstock.cli.main import ONE_THREAD, main

MEASURING_S = 20.0


def _keep_compressed() -> None:
    os.environ.update(ONE_THREAD)  # before numpy is imported
    from penstock.kernels import decoded_copies
    from penstock.kernels.native.backend import NativeOps, families
    from penstock.launch import compose, decoded_weights

    def keeps(ops: NativeOps, parts: Any, ends: tuple[int, ...]) -> bool:
        whole = all(part.n % 16 == 0 for part in parts[:-1]) and all(end % 4 == 0 for end in ends)
        return whole and ops.compute_dtype == "bf16"

    NativeOps._keeps_compressed = keeps  # type: ignore[method-assign]
    compose.decoding_families = families
    decoded_copies.MIN_GAIN = 0.0
    decoded_weights.measure_in_child = partial(decoded_weights.measure_in_child, budget_s=MEASURING_S)


if __name__ == "__main__":
    _keep_compressed()
    sys.exit(main())
