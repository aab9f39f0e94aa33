"""Writes the table of docs/models.md from ``family_cases.py``: ``python tests/golden/family_table.py``."""

from __future__ import annotations

from pathlib import Path

from family_cases import CASES, HEARD
from shrunk_models import Case

PAGE = Path(__file__).parents[2] / "docs/models.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"


def table() -> str:
    """One row a model, with everything that its entries prove."""
    rows: dict[tuple[str, str], list[Case]] = {}
    for case in (*CASES, *HEARD):
        rows.setdefault((case.models, case.architecture), []).append(case)
    lines = ["| models | `architectures` | tested with | specifics |", "|---|---|---|---|"]
    for (models, architecture), cases in rows.items():
        tested = ", ".join(dict.fromkeys(f"`{case.config}`" for case in cases))
        lines.append(f"| {models} | {architecture} | {tested} | {'; '.join(case.features for case in cases)} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with the table as it should be."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}{table()}{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
