"""``bench/gpu``: figures and their bars, the page, and every step of a run with tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench.gpu.__main__ import main
from bench.gpu.figures import BARS, Check, Findings
from bench.gpu.place import Clock
from bench.gpu.report import MARK, owed, picture, put_into, section

ROOT = Path(__file__).parents[3]


def findings() -> Findings:
    found = Findings(machine={"GPU": "a GPU"}, seconds=12.0)
    found.roofline = {"copy_bytes_per_s": 4.3e12, "read_bytes_per_s": 4.4e12, "matmul_flops": 7.8e14}
    found.record("decode_1", 0.9)
    found.record("compressed_1", 1.1, "weights of 11 GB")
    found.record("attention", 0.8)
    found.owe("start", "not built")
    found.checks = [Check("linear", passed=True, found=""), Check("gated", passed=False, found="law 1: 3 of 9")]
    found.tables["decode"] = [{"batch": 1, "of_read_rate": 0.9}, {"batch": 16, "of_read_rate": 0.7}]
    return found


def test_figures_stand_beside_their_bars_and_what_is_missing_is_owed() -> None:
    text = section(findings())
    assert "over weights and KV | >= 0.85 | 0.9 | met |" in text
    assert "| >= 1.2 | 1.1 x | **missed**, weights of 11 GB |" in text
    assert "against SDPA | shown | 0.8 | |" in text
    assert "| < 4 s | owed | not built |" in text
    assert "reads 4.40 TB/s, bf16 products 780 TFLOP/s" in text
    assert "1 of 2 checks passed." in text
    assert "- **gated**: law 1: 3 of 9" in text
    assert "| 16 | 0.7 |" in text
    assert len(owed(findings())) == len(BARS) - 3
    for unknown in (lambda: findings().record("speed", 1.0), lambda: findings().owe("speed", "")):
        with pytest.raises(KeyError):
            unknown()


def test_the_page_has_a_place_for_them_and_every_bar() -> None:
    page = (ROOT / "docs/benchmarks-gpu.md").read_text(encoding="utf-8")
    for bar in BARS:
        assert f"| {bar.what} | {bar.wanted} |" in page
    filled = put_into(page, section(findings()))
    assert filled.count(MARK) == 2
    assert "1 of 2 checks passed." in filled
    with pytest.raises(ValueError, match="twice"):
        put_into("no marks", "")


def test_a_picture_is_svg() -> None:
    drawn = picture("decode", findings().tables["decode"], "batch", "of_read_rate")
    root = ElementTree.fromstring(drawn)
    assert len(root.findall("{http://www.w3.org/2000/svg}circle")) == 2


def test_a_run_knows_how_much_time_is_left() -> None:
    clock = Clock(100.0)
    assert clock.allows(50.0)
    clock.began -= 60.0
    assert not clock.allows(50.0)


def test_without_a_gpu_it_says_what_can_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run"]) == 2
    assert "--dry walks every step without one" in capsys.readouterr().err


def test_a_page_that_cannot_take_tables_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page.md").write_text("no marks", encoding="utf-8")
    for name, why in (("page.md", "twice, it has it 0 times"), ("none.md", "No such file")):
        assert main(["run", "--dry", "--into", str(tmp_path / name)]) == 2
        assert why in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_dry_run_walks_every_step_without_the_extension(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARK}\n\n{MARK}\nafter\n", encoding="utf-8")
    hidden = "import sys; sys.modules['penstock.kernels._native'] = None\nfrom bench.gpu.__main__ import main\n"
    hidden += "sys.exit(main())"
    command = [sys.executable, "-c", hidden, "run", "--dry", "--out", str(tmp_path), "--into", str(page)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "findings.json").read_text(encoding="utf-8"))
    assert found["dry"]
    assert all(check["passed"] for check in found["checks"])
    assert len(found["checks"]) == 28
    missing = {bar.key for bar in BARS} - set(found["figures"])
    assert missing <= {"memory", "plan", "transformers", "compressed_64"}
    text = page.read_text(encoding="utf-8")
    assert "A dry run: nothing here is a measurement." in text
    assert "over weights and KV | >= 0.85 | walked | |" in text
    assert "missed" not in text
    assert (tmp_path / "decode-tokens_per_s.svg").exists()
