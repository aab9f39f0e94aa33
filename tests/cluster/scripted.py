"""A split service whose model writes what a script says (``scripted_model``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scripted_model.folder import write_agent_model

from .one_answer import TRUSTING
from .server import PenstockServer

MODEL = "scripted"


class ScriptedServer(PenstockServer):
    """``penstock serve`` with the model ``scripted``, made in ``folder``."""

    def __init__(self, folder: Path, flags: Sequence[str] = ()) -> None:
        model = folder / "scripted"
        if not model.exists():
            write_agent_model(model)
        super().__init__(flags, config=TRUSTING, folder=folder)
        self.module = "scripted_model"
        self._model = model

    def _words(self) -> list[str]:
        command, *flags = super()._words()
        return [command, str(self._model), "--served-model-name", MODEL, *flags]
