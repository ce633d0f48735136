"""Streams and events that keep what is queued until they are made to run it, in any order that waits allow.

What CUDA promises and no more: a stream runs its own in order, a wait holds up one stream until what was recorded in the
event by then has run, and nothing else orders two streams.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


class Streams:
    """Stands for `torch.cuda`. `broken`: waits of this function of the tier are lost. What is run takes a millisecond each."""

    def __init__(self, seed: int, broken: str = "") -> None:
        self.milliseconds = 0
        self.draw = random.Random(seed)
        self.broken = broken
        self.all: list[Any] = []
        self.lost = 0
        fake = self

        class Event:
            token: list[bool] | None = None
            at = 0

            def __init__(self, enable_timing: bool = False) -> None:
                pass

            def record(self, stream: Any) -> None:
                self.token = token = [False]

                def reached() -> None:
                    token[0], self.at = True, fake.milliseconds

                stream.queue.append(reached)

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at)

            def query(self) -> bool:
                return self.token is None or self.token[0]

            def synchronize(self) -> None:
                if fake.breaks("synchronize", self):
                    return
                while not self.query():
                    fake.step()

        class Stream:
            def __init__(self, device: Any = None) -> None:
                self.queue: deque[Any] = deque()
                fake.all.append(self)

            def wait_event(self, event: Any) -> None:
                if event.token is not None and not fake.breaks("wait", event):
                    self.queue.append(event.token)

        self.Event, self.Stream = Event, Stream
        self.compute = self.now = Stream()

    def breaks(self, kind: str, event: Any) -> bool:
        frame = sys._getframe(2)
        name = frame.f_code.co_name
        if name == "fetch":
            name = "fetch done" if event is frame.f_locals["self"].done else "fetch free"
        lost = name == self.broken
        self.lost += lost
        return lost

    def current_stream(self, device: Any = None) -> Any:
        return self.now

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def queue(self, action: Callable[[], Any]) -> None:
        self.now.queue.append(action)

    def copy(self, to: Any, of: Any) -> None:
        # the memory, not these tensors: who holds those is what tests ask
        to, of = (t.new_empty(0).set_(t.untyped_storage(), t.storage_offset(), t.size(), t.stride()) for t in (to, of))
        self.queue(lambda: to.copy_(of))

    def step(self) -> bool:
        """Run what is next on one stream, if anything can run."""
        able = [s for s in self.all if s.queue and (callable(s.queue[0]) or s.queue[0][0])]
        if not able:
            assert not any(s.queue for s in self.all), "streams wait for each other"
            return False
        self.milliseconds += 1
        action = self.draw.choice(able).queue.popleft()
        if callable(action):
            action()
        return True

    def some(self) -> None:
        for _ in range(self.draw.randrange(12)):
            self.step()

    def drain(self) -> None:
        while self.step():
            pass
