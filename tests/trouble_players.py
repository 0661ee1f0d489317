"""How schedules of trouble are played: one pool of forked ranks plays many, each with a coordinator of its own."""

from __future__ import annotations

import contextlib
import mmap
import pickle
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from forkpool import run_ranks
from trouble_model import Ended
from trouble_schedules import (
    EVERYONE,
    WORLD,
    Act,
    Drift,
    Evaluate,
    Event,
    Load,
    Recover,
    Reopen,
    Save,
    Schedule,
    Step,
)

import fp8dist as f8

KINDS = {kind.__name__: kind for kind in (ValueError, KeyError, RuntimeError, KeyboardInterrupt)}
PATIENCE = 8.0  # seconds of a coordinator; no schedule should ever wait so long
POOL_SECONDS = 100.0  # for one batch of schedules

Bits = tuple[tuple[int, ...], int, bool]


@dataclass
class Seen:
    """What one rank saw of one event, and what it had afterwards."""

    ended: Ended
    text: str = ""
    stats: tuple[int, ...] = ()
    slots: dict[str, Bits] = field(default_factory=dict)
    """By name: int32 bits of the history, oldest first, and of the scale; whether it is warm."""
    inverses: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Bits of the scale, and the inverse, that the slots in use show."""
    digests: dict[str, int] = field(default_factory=dict)
    stopped: bool = False
    """It did not play on: something happened that no schedule should see."""


class Lost(Exception):
    """What hits a rank behind a collective, before it commits."""


FORESEEN = (Lost, f8.PeerAborted, f8.RanksDisagree, f8.NeedsRecovery, *KINDS.values())


class _Player:
    """One rank's part in one schedule."""

    def __init__(self, rank: int, name: str, schedule: Schedule) -> None:
        self.rank, self.name, self.schedule = rank, name, schedule
        self.slots: dict[str, f8.Slot] = {}
        self.checkpoints: list[dict[str, Any]] = []
        self.coordinator = self.open(schedule.slots[rank])

    def open(self, names: Sequence[str]) -> f8.ReductionGroupCoordinator:
        coordinator = f8.ReductionGroupCoordinator(
            self.schedule.rule.recipe(), name=self.name, timeout=PATIENCE, stall_warning=None
        )
        self.slots = {name: coordinator.slot(name) for name in names}
        return coordinator

    def play(self) -> list[Seen]:
        seen = []
        for event in self.schedule.events:
            ended, text, stopped = Ended(), "", False
            try:
                ended = self.happen(event)
            except FORESEEN as error:
                ended, text = _ended(error, None), str(error)
                stopped = isinstance(error, f8.CollectiveTimeout | f8.TransportError)
            except BaseException as error:
                ended, text, stopped = _ended(error, None), str(error), True
            seen.append(replace(self.look(ended), text=text, stopped=stopped))
            if stopped:
                self.coordinator.__exit__(RuntimeError, None, None)
                return seen
        self.coordinator.close()
        return seen

    def look(self, ended: Ended) -> Seen:
        stats, state = self.coordinator.stats, self.coordinator.state_dict()
        agreed = self.coordinator.scales()
        assert int(state["generation"]) == stats.generation
        return Seen(
            ended,
            stats=(stats.commits, stats.collectives, stats.aborts, stats.generation, stats.nonfinite_amaxes),
            slots={
                name: (
                    tuple(fields["history"].view(torch.int32).tolist()),
                    int(fields["scale"].view(torch.int32)),
                    bool(fields["warm"]),
                )
                for name, fields in state["slots"].items()
            },
            inverses={
                name: (int(slot.scale.view(torch.int32)), float(slot.scale_inv))
                for name, slot in self.slots.items()
                if name in agreed
            },
            digests=self.coordinator.class_digests(),
        )

    def happen(self, event: Event) -> Ended:
        match event:
            case Step(acts):
                return self.step(acts[self.rank])
            case Recover(heal_from):
                self.coordinator.recover(heal_from=heal_from)
            case Save():
                self.checkpoints.append(self.gather(self.coordinator.state_dict()))
            case Load(checkpoint, ranks) if self.checkpoints and self.rank in ranks:
                return self.load(checkpoint)
            case Drift(rank, name, row) if rank == self.rank:
                state = self.coordinator.state_dict()
                fields = state["slots"][name]
                value = fields["scale"] if row is None else fields["history"][row]
                value.view(torch.int32).bitwise_xor_(1)
                self.coordinator.load_state_dict(state, strict=False)
            case Reopen(checkpoint, ranks):
                self.coordinator.close()
                self.coordinator = self.open(list(self.slots))
                if self.checkpoints and checkpoint is not None and self.rank in ranks:
                    return self.load(checkpoint)
            case Evaluate(ranks, amax) if self.rank in ranks:
                for slot in self.slots.values():
                    slot.record(torch.tensor([amax]))
                    with self.coordinator.paused():
                        slot.record(torch.tensor([amax]))
                        slot.request()
        return Ended()

    def load(self, checkpoint: int) -> Ended:
        state = self.checkpoints[checkpoint % len(self.checkpoints)]
        try:
            self.coordinator.load_state_dict(state)
        except ValueError as error:
            self.coordinator.load_state_dict(state, strict=False)
            return _ended(error, None)
        return Ended()

    def gather(self, state: dict[str, Any]) -> dict[str, Any]:
        """One checkpoint of all ranks' states; of what several hold the lowest rank's is kept."""
        store = dist.distributed_c10d._get_default_store()
        keys = [f"{self.name}/{len(self.checkpoints)}/{r}" for r in EVERYONE]
        store.set(keys[self.rank], pickle.dumps(state).hex())
        store.wait(keys, timedelta(seconds=PATIENCE))
        states = [pickle.loads(bytes.fromhex(store.get(key).decode())) for key in keys]
        slots = {name: fields for s in reversed(states) for name, fields in s["slots"].items()}
        return {"generation": states[0]["generation"], "slots": slots}

    def step(self, act: Act) -> Ended:
        step = self.coordinator.step(act.tag)
        time.sleep(act.late / 1000)
        inner = self.coordinator.step() if act.nested else contextlib.nullcontext()
        try:
            with self.hit_after(act.lost), step, inner:
                self.act(act, step)
        except FORESEEN as error:
            if isinstance(error, f8.CollectiveTimeout | f8.TransportError):
                raise
            return _ended(error, step.committed)
        return Ended(committed=step.committed)

    def act(self, act: Act, step: Any) -> None:
        if act.fail and act.fail_first:
            raise KINDS[act.fail]("before recording")
        if act.abort:
            step.abort()
        for name in act.new:
            self.slots[name] = self.coordinator.slot(name)
        for name, amax in act.records:
            if name in self.slots:
                self.slots[name].record(torch.tensor([-amax]))
        with self.coordinator.paused():
            for name, amax in act.paused:
                if name in self.slots:
                    self.slots[name].record(torch.tensor([amax]))
                    self.slots[name].request()
        if act.request:
            for slot in self.slots.values():
                slot.request()
        if act.fail:
            raise KINDS[act.fail]("after recording")

    @contextlib.contextmanager
    def hit_after(self, number: int) -> Iterator[None]:
        """Raise `Lost` where this rank has waited for so many reductions, and has what they gave."""
        if not number:
            yield
            return
        self.coordinator.freeze()  # its reductions do not count
        transport = self.coordinator._transport
        original, left = transport.start_max, number

        def start_max(words: torch.Tensor) -> Any:
            nonlocal left
            work = original(words)
            left -= 1
            return work if left else _LosingWork(work)

        vars(transport)["start_max"] = start_max
        try:
            yield
        finally:
            del vars(transport)["start_max"]


class _LosingWork:
    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self, seconds: float) -> bool:
        if self.work.wait(seconds):
            raise Lost("behind the collective")
        return False


def _ended(error: BaseException, committed: bool | None) -> Ended:
    about = getattr(error, "rank", getattr(error, "field", None))
    return Ended(type(error).__name__, frozenset() if about is None else frozenset([about]), committed)


def play(schedules: Sequence[Schedule]) -> list[list[list[Seen]]]:
    """What the ranks saw, by schedule, rank and event; it ends behind the first schedule that a rank did not finish.

    Raises:
        RankHung: some rank never came back; a note tells the schedule.
    """
    where = mmap.mmap(-1, 8 * WORLD)  # shared with the forks

    def run(rank: int, world: int) -> list[list[Seen]]:
        played: list[list[Seen]] = []
        for i, schedule in enumerate(schedules):
            struct.pack_into("q", where, 8 * rank, i)
            played.append(_Player(rank, f"trouble{i}", schedule).play())
            if played[-1] and played[-1][-1].stopped:
                break
        return played

    outcomes = run_ranks(run, world=WORLD, timeout=POOL_SECONDS)
    try:
        outcomes.raise_first()
    except BaseException as error:
        places = struct.unpack_from(f"{WORLD}q", where)
        for i in sorted(set(places)):
            error.add_note(
                f"ranks {[r for r in EVERYONE if places[r] == i]} were in schedule {schedules[i]!r}"
            )
        raise
    return [list(by_rank) for by_rank in zip(*(outcome.value for outcome in outcomes), strict=False)]
