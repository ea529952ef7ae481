from __future__ import annotations

import math
import shutil
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ovmstrio.core.errors import (
    ModelFailure,
    SequenceEnding,
    SequenceExists,
    SequenceMissing,
    ServerError,
    TooManySequences,
)
from ovmstrio.core.tensor import Tensor
from ovmstrio.models.sequences import SequenceManagers
from ovmstrio.models.sequences.manager import remove_idle_sequences
from ovmstrio.models.stateful import StatefulServable
from tests.support import ir
from tests.support.examples import examples
from tests.support.loops import TrioThread
from tests.support.servables import raw_request, stateful_over

CAPACITY = 3
KINDS = st.sampled_from(["start", "step", "step", "end", "both"])
NUMBERS = st.integers(1, 4)


@dataclass(eq=False)
class _Sent:
    token: int
    number: int
    kind: str
    value: int
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    gate: trio.Event | None = None
    inferred: trio.Event = field(default_factory=trio.Event)
    fails: bool = False
    result: tuple[int, int, int] | type[ServerError] | None = None
    over: bool = False

    @property
    def starts(self) -> bool:
        return self.kind in {"start", "both"}

    @property
    def ends(self) -> bool:
        return self.kind in {"end", "both"}


@dataclass
class _Expected:
    total: int = 0
    tokens: int = 0
    waiting: list[_Sent] = field(default_factory=list)
    idle: bool = False

    @property
    def ending(self) -> bool:
        return any(sent.ends for sent in self.waiting)


class _GatedNetwork:
    def __init__(self, real: Any, sent: dict[int, _Sent]) -> None:
        self._real = real
        self._sent = sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    async def infer(self, arrays: Any, change: Any, event: Any = None, max_output_bytes: float = math.inf) -> Any:
        sent = self._sent[int(arrays[0][0, 1])]
        sent.gate = trio.Event()
        await sent.gate.wait()
        outputs = await self._real.infer(arrays, change, event, max_output_bytes)
        await sent.inferred.wait()
        if sent.fails:
            raise ModelFailure("requested")
        return outputs


class _SequenceHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp())
        self.loop = TrioThread()
        self.managers = SequenceManagers()
        self.sent: dict[int, _Sent] = {}
        self.alive: dict[int, _Expected] = {}
        self.dropped: list[_Expected] = []
        self.next_id = 1
        self.servable = self.loop.run(self._load, True)

    async def _load(self, can_migrate: bool) -> StatefulServable:
        return stateful_over(
            ir.accumulator(),
            self.base,
            partial(_GatedNetwork, sent=self.sent),
            managers=self.managers,
            max_sequence_number=CAPACITY,
            sequence_migration=can_migrate,
        )

    def teardown(self) -> None:
        for sent in self.sent.values():
            self.loop.call(sent.scope.cancel)
        self.loop.close()
        assert all(not sequence.is_busy for manager in self.managers for sequence in manager)
        shutil.rmtree(self.base)

    async def _infer(self, sent: _Sent, number: int) -> None:
        request = raw_request({"x": np.array([[sent.value, sent.token]], np.float32)})
        request.parameters = {"sequence_id": number, "sequence_start": sent.starts, "sequence_end": sent.ends}
        with sent.scope:
            try:
                response = await self.servable.infer(request)
            except ServerError as error:
                sent.result = type(error)
            else:
                y, state = response.outputs
                assert isinstance(y, Tensor)
                assert isinstance(state, Tensor)
                sent.result = (int(y.array[0, 0]), int(y.array[0, 1]), int(state.array[0]))
        sent.over = True

    @rule(number=NUMBERS, kind=KINDS, value=st.integers(1, 100))
    def send(self, number: int, kind: str, value: int) -> None:
        self._send(number, number, kind, value)

    @precondition(lambda self: self.alive)
    @rule(index=st.integers(0, 2), kinds=st.lists(KINDS, min_size=2, max_size=4), value=st.integers(1, 100))
    def send_to_a_live_one(self, index: int, kinds: list[str], value: int) -> None:
        number = sorted(self.alive)[index % len(self.alive)]
        for kind in kinds:
            self._send(number, number, kind, value)

    @rule(kind=st.sampled_from(["start", "both"]), value=st.integers(1, 100))
    def send_without_id(self, kind: str, value: int) -> None:
        number = self.next_id
        if len(self.alive) < CAPACITY:
            while number in self.alive:
                number += 1
            self.next_id = number + 1
        self._send(0, number, kind, value)

    def _send(self, expected: int, number: int, kind: str, value: int) -> None:
        sent = _Sent(len(self.sent) + 1, number, kind, value)
        refusal = self._refusal(sent)
        self.sent[sent.token] = sent
        self.loop.start(self._infer, sent, expected)
        assert sent.result == refusal
        if refusal is None:
            self.alive.setdefault(number, _Expected()).waiting.append(sent)

    def _refusal(self, sent: _Sent) -> type[ServerError] | None:
        expected = self.alive.get(sent.number)
        if not sent.starts:
            return SequenceMissing if expected is None or expected.ending else None
        if len(self.alive) >= CAPACITY:
            return TooManySequences
        if expected is None:
            return None
        return SequenceEnding if expected.ending else SequenceExists

    def _all(self) -> list[_Expected]:
        return [*self.alive.values(), *self.dropped]

    def _pick(self, index: int, *, running: bool) -> tuple[_Sent, _Expected]:
        waiting = [(each, (each.waiting[:1] if running else each.waiting)) for each in self._all()]
        flat = [(sent, each) for each, requests in waiting for sent in requests]
        return flat[index % len(flat)]

    def _busy(self) -> bool:
        return any(expected.waiting for expected in self._all())

    def _end(self, number: int, expected: _Expected) -> None:
        if self.alive.get(number) is expected:
            del self.alive[number]

    @precondition(_busy)
    @rule(index=st.integers(0, 20))
    def begin(self, index: int) -> None:
        sent, _ = self._pick(index, running=True)
        assert sent.gate is not None
        self.loop.call(sent.gate.set)
        assert not sent.over

    @precondition(_busy)
    @rule(index=st.integers(0, 20), fails=st.sampled_from([False, False, False, True]))
    def finish(self, index: int, fails: bool) -> None:
        sent, expected = self._pick(index, running=True)
        assert sent.gate is not None
        sent.fails = fails
        self.loop.call(sent.gate.set)
        self.loop.call(sent.inferred.set)
        if fails:
            assert sent.result is ModelFailure
            self._undo(sent, expected)
            return
        expected.total += sent.value
        expected.tokens += sent.token
        assert sent.result == (expected.total, expected.tokens, sent.number)
        expected.waiting.remove(sent)
        expected.idle = False
        if sent.ends:
            assert not expected.waiting
            self._end(sent.number, expected)

    @precondition(_busy)
    @rule(index=st.integers(0, 20))
    def cancel(self, index: int) -> None:
        sent, expected = self._pick(index, running=False)
        self.loop.call(sent.scope.cancel)
        assert sent.over
        assert sent.result is None
        self._undo(sent, expected)

    def _undo(self, sent: _Sent, expected: _Expected) -> None:
        expected.waiting.remove(sent)
        if sent.starts:
            self._end(sent.number, expected)
            assert [other.result for other in expected.waiting] == [SequenceMissing] * len(expected.waiting)
            expected.waiting.clear()

    @rule()
    def clean(self) -> None:
        removed = {number for number, each in self.alive.items() if each.idle and not each.waiting}
        for number in removed:
            del self.alive[number]
        for expected in self.alive.values():
            expected.idle = expected.idle or not expected.waiting
        assert self.loop.call(remove_idle_sequences, self.managers) == len(removed)

    @rule(can_migrate=st.sampled_from([True, True, False]))
    def load_again(self, can_migrate: bool) -> None:
        (before,) = self.managers
        self.servable = self.loop.run(self._load, can_migrate)
        (after,) = self.managers
        assert (before is after) == can_migrate
        if not can_migrate:
            self.dropped += self.alive.values()
            self.alive = {}
            self.next_id = 1

    @invariant()
    def the_live_sequences_are_the_expected_ones(self) -> None:
        assert {sequence.id for manager in self.managers for sequence in manager} == set(self.alive)

    @invariant()
    def the_first_of_each_queue_runs(self) -> None:
        running = {sent.token for sent in self.sent.values() if sent.gate is not None and not sent.over}
        assert running == {each.waiting[0].token for each in self._all() if each.waiting}


_SequenceHistory.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
TestSequenceHistory = _SequenceHistory.TestCase
