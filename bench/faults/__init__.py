"""Faults and loads that Penstock must stand, as bounded runs on real processes: ``python -m bench.faults``.

Services, clients and the hand that kills are those of ``tests/cluster``; a short form of each run is a test there.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

for folder in (ROOT, ROOT / "tests"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
