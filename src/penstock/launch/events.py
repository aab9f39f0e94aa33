"""What goes into the restart machine (events), and what comes out of it (effects).  Plain data."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from penstock.launch.board import Heartbeat
from penstock.wire.messages import SupervisorMessage

HOPELESS = 78
"""The exit code (EX_CONFIG) of a child that can never start: not tried again."""

CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP})
"""Signals that a process brings upon itself."""

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: an exit code, or the signal that ended it, and what it had to say."""

    code: int | None = None
    signal: int | None = None
    last_words: str = ""
    out_of_memory: bool = False  # the system ended it, having no memory left

    @property
    def by_itself(self) -> bool:
        """Did it die of what it did?  SIGKILL and SIGTERM come from outside, but for those of a lack of memory."""
        if self.signal is not None:
            return self.out_of_memory or self.signal in CRASHES
        return self.code not in (0, None, HOPELESS)

    def __str__(self) -> str:
        if self.signal is not None:
            try:
                how = f"killed by {signal.Signals(self.signal).name}"
            except ValueError:
                how = f"killed by signal {self.signal}"
        else:
            how = f"exit code {self.code}"
        if self.out_of_memory:
            how += ", out of memory"
        return f"{self.last_words} ({how})" if self.last_words else how


@dataclass(frozen=True, slots=True)
class Died:
    """The process of this incarnation has ended and was reaped (or could not be forked at all)."""

    child: str
    incarnation: int
    exit: Exit


@dataclass(frozen=True, slots=True)
class Vitals:
    """What the system knows of a process."""

    stopped: bool = False  # by SIGSTOP
    cpu_s: float = 0.0  # computed since it began, all its threads together
    queued_s: float = (
        0.0  # that its first thread could have computed, and others had the processors; of waits that ended
    )
    runnable: bool = False  # at this moment one of its threads computes or waits for a processor


@dataclass(frozen=True, slots=True)
class Looked:
    """All slots of the board and what the system says of their processes, at one moment."""

    heartbeats: dict[str, Heartbeat]
    vitals: dict[str, Vitals] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Suspected:
    """The gateway thinks that this worker does nothing."""

    child: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """The front of a catalogue wants this model's process."""

    child: str


@dataclass(frozen=True, slots=True)
class Dismissed:
    """The front of a catalogue wants it no more."""

    child: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """SIGTERM or SIGINT came; the second one means now."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing happened but time."""


Event = Died | Looked | Suspected | Wanted | Dismissed | StopAsked | Tick


# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fork:
    """Start this incarnation (and, for a worker, tell the gateway)."""

    child: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Send this signal to the process of this incarnation."""

    child: str
    incarnation: int
    signal: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Send this to the gateway."""

    message: SupervisorMessage


@dataclass(frozen=True, slots=True)
class Note:
    """Something for the log."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """Every child has ended.  ``complaint`` is the last line to be said, when giving up."""

    code: int
    complaint: str | None = None


Effect = Fork | Kill | Tell | Note | Done
