"""Tests under mpirun with pytest-mpi: one terminal, one verdict per test, and nobody waits for ever.

    mpirun -n 4 python -m pytest --with-mpi --world-size 4 tests/distributed

Every rank runs every test. Behind each test's body and again behind its teardown the ranks exchange
(test, outcome, traceback) on a communicator of their own, without blocking and with a deadline:

    all passed                           passed
    failed on any rank                   failed on all, so that they stay in step; the report names the rank
    outcomes differ (one rank skips)     failed on all
    a rank does not come within          the failed rank tells why it failed and who did not come, then
      `--rank-grace` after a failure       it ends all ranks by MPI_Abort
    a rank is stuck past the time limit  it writes its stacks and ends all ranks; if it cannot, the others do
    nothing of this works                faulthandler ends the process

Rank 0 owns the terminal and the junit file. What other ranks print is shown when they fail.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from ranks import World, size_that_mpirun_promised

HERE = Path(__file__).parent
HARNESS = "rank-harness"
# Of one test, in seconds; `@pytest.mark.timeout(S)` changes it, as in the unit tests.
TIME_LIMIT = 60.0
# For what is no test's own work: leaving together, and MPI's finalization.
LEAVE_SECONDS = 30.0


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks")
    group.addoption("--world-size", type=int, help="refuse to run on any other number of ranks")
    group.addoption(
        "--rank-grace",
        type=float,
        default=5.0,
        help="seconds that a rank may finish later than one that failed",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    if not _with_mpi(config):
        return
    from mpi4py import MPI

    _check_world_size(MPI.COMM_WORLD.size, config.getoption("--world-size"))
    # Not at import: there, fd 2 is the file into which pytest captures.
    harness = RankHarness(MPI, os.dup(2), config.getoption("--rank-grace"))
    if harness.rank != 0:
        config.option.xmlpath = None
    config.pluginmanager.register(harness, HARNESS)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(*sizes): run at these numbers of ranks only, else deselect")
    if _with_mpi(config) and not config.pluginmanager.hasplugin(HARNESS):
        # pytest found this file too late for its options and for a world that is checked.
        raise pytest.UsageError(
            f"expected {HERE.name}/ or a file in it on the command line; do name it there"
        )


def _with_mpi(config: pytest.Config) -> bool:
    return bool(config.getoption("with_mpi") or config.getoption("only_mpi"))


def _check_world_size(size: int, asked: int | None) -> None:
    promised = size_that_mpirun_promised()
    if promised is None:
        raise pytest.UsageError(
            "expected ranks under mpirun but got a process that no MPI launcher started; "
            "do `bash tests/run.sh`"
        )
    for source, expected in (("mpirun", promised), ("--world-size", asked)):
        if expected is not None and expected != size:
            raise pytest.UsageError(
                f"expected a world of {expected} ranks ({source}) but MPI has {size}; do start with the "
                "mpirun that lies beside this python and as many ranks as --world-size says"
            )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    harness: RankHarness | None = config.pluginmanager.getplugin(HARNESS)
    kept, dropped = [], []
    for item in items:
        if HERE in item.path.parents:
            if item.get_closest_marker("mpi") is None:
                item.add_marker(pytest.mark.mpi)
            sizes = item.get_closest_marker("ranks")
            if harness and sizes and harness.size not in sizes.args:
                dropped.append(item)
                continue
        if harness:
            limit = item.get_closest_marker("timeout")
            item.stash[_LIMIT] = float((*limit.args, *limit.kwargs.values())[0]) if limit else TIME_LIMIT
            # pytest-timeout would end this rank alone.
            item.add_marker(pytest.mark.timeout(0), append=False)
        kept.append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Initialise torch.distributed once per session."""
    # Here, so that a library that does not import is a failed test with a traceback and no broken session.
    import torch
    import torch.distributed as dist

    from fp8dist.bootstrap import init_process_group_from_mpi

    torch.set_num_threads(1)
    init_process_group_from_mpi("gloo", timeout=timedelta(seconds=TIME_LIMIT))
    yield World(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


_LIMIT = pytest.StashKey[float]()


@dataclass(frozen=True)
class Word:
    """What a rank says at an exchange: where it is, how that ended, and the text that belongs to it."""

    place: str
    outcome: str
    text: str = ""


class RankHarness:
    """Keeps the ranks of one session together. One instance per process."""

    def __init__(self, mpi: Any, terminal_fd: int, grace: float) -> None:
        self.mpi = mpi
        self.comm = mpi.COMM_WORLD.Dup()  # nothing that a test sends can be taken for a word
        self.rank: int = self.comm.rank
        self.size: int = self.comm.size
        self.terminal_fd = terminal_fd
        self.grace = grace
        self.limit = TIME_LIMIT
        self.exchanges = 0
        self.watchdog: threading.Timer | None = None
        self.collect_errors: list[str] = []
        self.output = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - of this whole session
        self.strangers: dict[int, Word] = {}

    # -- one terminal

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        reporter = config.pluginmanager.getplugin("terminalreporter")
        if self.rank != 0 and reporter is not None:
            config.pluginmanager.unregister(reporter)
            config.pluginmanager.register(type(reporter)(config, self.output), "terminalreporter")
        for plugin in config.pluginmanager.get_plugins():
            if type(plugin).__name__ == "MPIPlugin":  # its closing section is 40 lines of constants
                plugin._is_testing_mpi = False

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for rank, word in sorted(self.strangers.items()):
            terminalreporter.section(f"rank {rank} of {self.size} ended with status {word.outcome}")
            terminalreporter.write_line(word.text)

    # -- the ranks collect the same tests

    def pytest_sessionstart(self) -> None:
        self._watch("collection")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.collect_errors.append(report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        ids = "\n".join(item.nodeid for item in session.items)
        mine = Word("collection", f"{len(self.collect_errors)} errors\n{ids}", "\n".join(self.collect_errors))
        words = self.exchange(mine)
        if len({word.outcome for word in words.values()}) > 1:
            lists = (f"---- rank {rank}: {word.outcome}\n{word.text}" for rank, word in sorted(words.items()))
            pytest.exit("expected the same tests on all ranks but got:\n" + "\n".join(lists), returncode=4)

    # -- one verdict per test

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.limit = item.stash[_LIMIT]
        faulthandler.dump_traceback_later(
            2 * self.limit + 4 * self.grace + LEAVE_SECONDS, exit=True, file=self.terminal_fd
        )
        self._watch(item.nodeid)
        try:
            return (yield)
        finally:
            self._unwatch()
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, pytest.TestReport]:
        report: pytest.TestReport = yield
        if report.when == "setup" and report.passed:
            return report  # the body follows
        place = f"{item.nodeid} ({'teardown' if report.when == 'teardown' else 'body'})"
        words = self.exchange(Word(place, _outcome(report), self._explain(report)))
        if report.when != "teardown":
            self._watch(item.nodeid)
        failed = {rank: word for rank, word in words.items() if word.outcome == "failed"}
        if failed:
            _fail(report, _merge(failed, self.size))
        elif len({word.outcome for word in words.values()}) > 1:
            lines = [
                f"  rank {rank}: {word.outcome} {word.text}".rstrip() for rank, word in sorted(words.items())
            ]
            _fail(report, "\n".join([f"outcomes differ between the {self.size} ranks:", *lines]))
        return report

    def _explain(self, report: pytest.TestReport) -> str:
        if report.skipped:
            return str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
        if not report.failed:
            return ""
        # Rank 0's captured output stands in its own report already.
        sections = [] if self.rank == 0 else [f"---- {title}\n{text}" for title, text in report.sections]
        return "\n".join([report.longreprtext, *sections])

    # -- leaving together

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self.limit = LEAVE_SECONDS
        self.output.flush()
        self.output.seek(0)
        words = self.exchange(Word("end of the session", str(int(exitstatus)), self.output.read()))
        self.output.seek(0, os.SEEK_END)
        self.strangers = {rank: word for rank, word in words.items() if word.outcome != words[0].outcome}
        # One rank's internal error is everybody's, or rank 0 would close with a line that says "passed".
        session.exitstatus = max(int(word.outcome) for word in words.values())

    def pytest_unconfigure(self) -> None:
        self._unwatch()
        # MPI's finalization runs at exit and can hang if a peer died.
        faulthandler.dump_traceback_later(LEAVE_SECONDS, exit=True, file=self.terminal_fd)

    # -- the exchange

    def exchange(self, mine: Word) -> dict[int, Word]:
        """Tell all ranks `mine` and return every rank's word for the same place, or end the job."""
        self._unwatch()
        self.exchanges += 1
        tag = self.exchanges % 30000
        sends = [self.comm.isend(mine, other, tag) for other in range(self.size) if other != self.rank]
        words = {self.rank: mine}
        deadline = time.monotonic() + self.limit + self.grace
        pause = 0.0
        while len(words) < self.size or not self.mpi.Request.Testall(sends):
            status = self.mpi.Status()
            if self.comm.iprobe(self.mpi.ANY_SOURCE, tag, status):
                word = words[status.source] = self.comm.recv(source=status.source, tag=tag)
                if word.place != mine.place:
                    self._end(
                        words, f"rank {self.rank} is at {mine.place}, rank {status.source} at {word.place}"
                    )
                pause = 0.0
                continue
            if any(word.outcome == "failed" for word in words.values()):
                deadline = min(deadline, time.monotonic() + self.grace)
            if time.monotonic() > deadline:
                self._end(words, mine.place)
            time.sleep(pause)
            pause = min(0.005, pause + 0.0001)
        return words

    def _end(self, words: dict[int, Word], what: str) -> None:
        """Say which ranks did not come, and why the others came, then end all ranks."""
        missing = [rank for rank in range(self.size) if rank not in words]
        failed = {rank: word for rank, word in words.items() if word.outcome == "failed"}
        speaker = min(failed or words)
        if self.rank == speaker:
            lines = [f"==== {what}"]
            if missing:
                lines.append(
                    f"==== ranks {missing} of {self.size} did not finish this; they are stuck or dead"
                )
            if failed:
                lines.append(_merge(failed, self.size))
            self._say("\n".join([*lines, "==== ending all ranks"]))
        time.sleep(0.3 if self.rank == speaker else 3.0)  # the others only if the speaker cannot
        self.comm.Abort(1)

    # -- the watchdog of this rank

    def _watch(self, place: str) -> None:
        self._unwatch()
        self.watchdog = threading.Timer(self.limit, self._stuck, (place,))
        self.watchdog.daemon = True
        self.watchdog.start()

    def _unwatch(self) -> None:
        if self.watchdog is not None:
            self.watchdog.cancel()
            self.watchdog = None

    def _stuck(self, place: str) -> None:
        with tempfile.TemporaryFile("w+") as stacks:
            faulthandler.dump_traceback(stacks, all_threads=True)
            stacks.seek(0)
            self._say(
                f"==== rank {self.rank} of {self.size} has not finished {place} after {self.limit:g} s; "
                f"it is at:\n{stacks.read()}==== ending all ranks"
            )
        time.sleep(1.5)  # other ranks that are stuck may say so too
        self.comm.Abort(1)

    def _say(self, text: str) -> None:
        os.write(self.terminal_fd, f"\n{text}\n".encode())


def _outcome(report: pytest.TestReport) -> str:
    return f"x{report.outcome}" if hasattr(report, "wasxfail") else report.outcome


def _fail(report: pytest.TestReport, text: str) -> None:
    report.outcome = "failed"
    report.longrepr = text
    if hasattr(report, "wasxfail"):
        del report.wasxfail


def _merge(failed: dict[int, Word], size: int) -> str:
    """Join the ranks' tracebacks; those that differ in the rank alone stand once."""
    ranks_of: dict[str, list[int]] = {}
    for rank, word in sorted(failed.items()):
        ranks_of.setdefault(word.text.replace(f"rank={rank}", "rank=?"), []).append(rank)
    parts = []
    for ranks in ranks_of.values():
        names = ", ".join(map(str, ranks))
        text = failed[ranks[0]].text
        parts.append(f"==== failed on rank{'s' if len(ranks) > 1 else ''} {names} of {size}\n{text}")
    return "\n".join(parts)
