"""Runs the scripts of ``examples``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name: str, url: str, folder: Path, *words: str) -> str:
    """What the script prints, as it stands but for the service's address; ``folder`` is for its copy."""
    copy = folder / name
    copy.write_text((EXAMPLES / name).read_text().replace("http://127.0.0.1:8000", url))
    run = subprocess.run([sys.executable, copy, *words], capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout
