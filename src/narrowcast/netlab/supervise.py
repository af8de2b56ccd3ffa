"""Watch the ranks to their end: pass on what they print, notice how each ended, and end the rest when one failed.

When a rank fails, the others have `grace` seconds to end by themselves (they usually fail too, and say why), then get
SIGTERM, and after as long again SIGKILL. A signal to netlab starts at SIGTERM; a second one goes straight to SIGKILL.
One loop and no threads: the kernel ties the ranks' lives to the thread that started them.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType

from .output import Output
from .processes import exit_code, send

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TICK = 0.1  # seconds between looks at signals and clocks


@dataclass
class Stop:
    """Signals that asked for an end. They are noted, not raised, so that no set-up or clean-up breaks in the middle."""

    numbers: list[int] = field(default_factory=list)

    @contextlib.contextmanager
    def listening(self) -> Iterator[Stop]:
        def note(number: int, frame: FrameType | None) -> None:
            self.numbers.append(number)

        before = {number: signal.signal(number, note) for number in ENDING}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass
class Ended:
    """How a rank ended."""

    code: int
    seconds: float


class Watch:
    """The ranks, from start to end. `say` prints a line of netlab's own; `check` raises when the network breaks."""

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        output: Output,
        stop: Stop,
        *,
        grace: float = 3.0,
        keep_going: bool = False,
        say: Callable[[str], None] = lambda line: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.processes, self.output, self.stop, self.say, self.check = list(processes), output, stop, say, check
        self.grace, self.keep_going = grace, keep_going
        self.began = time.monotonic()
        self.ended: dict[int, Ended] = {}
        self.failed: int | None = None
        self.steps: list[tuple[float, signal.Signals]] = []  # signals yet to send, each with its time
        self.sent: list[signal.Signals] = []

    def run(self) -> dict[int, Ended]:
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.processes):
                for stream, pipe in ((1, process.stdout), (2, process.stderr)):
                    if pipe:
                        os.set_blocking(pipe.fileno(), False)
                        selector.register(pipe, selectors.EVENT_READ, (rank, stream))
                # Ready when the process ends, so that the first to fail is known to be first.
                selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, (rank, 0))
            while len(self.ended) < len(self.processes):
                for key, _ in selector.select(TICK):
                    self.attend(selector, key)
                self.check()
                self.act()
        return dict(sorted(self.ended.items()))

    def code(self) -> int:
        """What netlab ends with: the first failure's code, or 128 and the signal that ended it."""
        if self.stop.numbers:
            return 128 + self.stop.numbers[0]
        return 0 if self.failed is None else self.ended[self.failed].code

    def attend(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        rank, stream = key.data
        if stream:
            if not self.drain(rank, stream):
                selector.unregister(key.fileobj)
            return
        selector.unregister(key.fileobj)
        os.close(key.fd)
        for each in (1, 2):
            self.drain(rank, each)
        self.output.finish(rank)
        self.note_end(rank)

    def drain(self, rank: int, stream: int) -> bool:
        """Pass on what is there. False at the end; a pipe that a grandchild holds open has none, and is left."""
        pipe = self.processes[rank].stdout if stream == 1 else self.processes[rank].stderr
        while pipe:
            try:
                data = os.read(pipe.fileno(), 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                break
            self.output.write(rank, stream, data)
        return False

    def note_end(self, rank: int) -> None:
        self.processes[rank].wait()
        code, seconds = exit_code(self.processes[rank]) or 0, time.monotonic() - self.began
        self.ended[rank] = Ended(code, seconds)
        if not code or self.sent:
            return
        self.output.reveal(rank)
        first, self.failed = self.failed is None, rank if self.failed is None else self.failed
        line = f"rank {rank} ended with {described(code)} after {seconds:.1f} s"
        left = len(self.processes) - len(self.ended)
        if first and left and not self.keep_going:
            now = time.monotonic()
            self.steps = [(now + self.grace, signal.SIGTERM), (now + 2 * self.grace, signal.SIGKILL)]
            line += f"; the others have {self.grace:g} s to end (--grace, --keep-going)"
        self.say(line)

    def act(self) -> None:
        """Send what is due."""
        now = time.monotonic()
        if len(self.stop.numbers) == 1 and not self.sent:
            self.steps = [(now, signal.SIGTERM), (now + self.grace, signal.SIGKILL)]
        if len(self.stop.numbers) > 1 and signal.SIGKILL not in self.sent:
            self.steps = [(now, signal.SIGKILL)]
        while self.steps and self.steps[0][0] <= now:
            _, number = self.steps.pop(0)
            left = [rank for rank in range(len(self.processes)) if rank not in self.ended]
            if left:
                why = f" ({signal.Signals(self.stop.numbers[0]).name} came)" if self.stop.numbers else ""
                self.say(f"{number.name} to {ranks(left)}{why}")
            for rank in left:
                send(self.processes[rank], number)
            self.sent.append(number)


def described(code: int) -> str:
    """How a code reads: a signal by its name."""
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"exit code {code} ({signal.Signals(code - 128).name})"
    return f"exit code {code}"


def ranks(which: Sequence[int]) -> str:
    return f"rank{'s' if len(which) > 1 else ''} {', '.join(map(str, which))}"
