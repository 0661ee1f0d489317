"""The closing line of all parts counts every test once, and no failure of a part gets lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from summary import main

CASES = {
    "passed": "<testcase/>",
    "failed": "<testcase><failure/></testcase>",
    "error": "<testcase><error/></testcase>",
    "skipped": '<testcase><skipped type="pytest.skip"/></testcase>',
    "xfailed": '<testcase><skipped type="pytest.xfail"/></testcase>',
}


def _report(folder: Path, name: str, *outcomes: str) -> Path:
    cases = "".join(CASES[outcome] for outcome in outcomes)
    path = folder / f"{name}.xml"
    path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    return path


def test_parts_are_added_up_and_skips_do_not_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unit = _report(tmp_path, "unit", "passed", "passed", "skipped", "xfailed")
    mpi = _report(tmp_path, "mpi", "passed")
    assert main(["1000", f"unit=0={unit}", f"mpi2=0={mpi}"], clock=lambda: 1095.214) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "== 3 passed, 1 skipped, 1 xfailed in 95.21s =="


def test_failures_of_all_parts_are_added_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unit = _report(tmp_path, "unit", "passed", "failed")
    mpi = _report(tmp_path, "mpi", "failed", "error")
    assert main(["1", f"unit=1={unit}", f"mpi2=1={mpi}"], clock=lambda: 2.0) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "== 2 failed, 1 passed, 1 error in 1.00s =="


@pytest.mark.parametrize("text", [None, "", "<testsuites><testsuite>"], ids=["none", "empty", "broken off"])
@pytest.mark.parametrize("status", ["0", "1"])
def test_a_part_without_a_report_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, status: str
) -> None:
    unit = _report(tmp_path, "unit", "passed")
    other = tmp_path / "other.xml"
    if text is not None:
        other.write_text(text)
    assert main(["1", f"unit=0={unit}", f"mpi4={status}={other}"], clock=lambda: 2.0) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "== 1 failed, 1 passed in 1.00s =="


def test_a_status_without_a_failed_test_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = _report(tmp_path, "unit", "passed")
    assert main(["1", f"unit=3={report}"], clock=lambda: 2.0) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "== 1 failed, 1 passed in 1.00s =="


def test_no_test_at_all_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = _report(tmp_path, "unit")
    assert main(["1", f"unit=0={report}"], clock=lambda: 2.0) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "== no tests ran in 1.00s =="
