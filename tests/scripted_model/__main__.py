"""``penstock serve FOLDER ...``, with the runner of the script: processes that it forks have it, too."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from penstock.cli.main import ONE_THREAD, main


def replace_runner(folder: Path) -> None:
    """Have workers of this process draw the script's tokens."""
    os.environ.update(ONE_THREAD)  # before numpy is imported: a process with threads must not fork
    from penstock.launch import worker_process

    from .runner import ScriptedRunner

    ScriptedRunner.folder = folder
    worker_process.ModelRunner = ScriptedRunner  # type: ignore[misc]


if __name__ == "__main__":
    replace_runner(Path(sys.argv[2]))
    sys.exit(main())
