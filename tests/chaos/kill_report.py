"""What came of rounds in which ranks were lost, beside what is promised. Knows figures; no server."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.bench.coherence import most_that_may_differ

__all__ = ["MOMENTS", "Report", "spread"]

MOMENTS = ("idle", "prefill", "decode", "recovery")
_NOTICED_S = 1.0  # a rank that is killed or raises
_SLOWER_THAN_COLD_S = 3.0


@dataclass
class Report:
    """What the losses did. Times in seconds."""

    seed: int
    way: str
    tp: int
    step_timeout_s: float
    moments: list[str]  # aimed at, one a round
    hits: dict[str, int] = field(default_factory=dict)  # moments in which losses came, by the engine's words
    damages: list[float] = field(default_factory=list)  # when signals were sent that are damage by themselves
    noticed_s: list[float] = field(default_factory=list)  # after a kill or an exception
    timed_out_s: list[float] = field(default_factory=list)  # after a stop or a hang
    recovered_s: list[float] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)
    num_streams: int = 0
    num_different: int = 0  # of these in ids, at ties; any other difference is a problem
    num_replayed: int = 0  # sequences that ran when ranks were lost
    num_restarts: int = 0
    num_unasked: int = 0  # losses that nobody caused: steps over the timeout, on a busy machine
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def failures(self) -> list[str]:
        """What was not as promised, timing included."""
        return self.wrong() + self.missed() + self.late()

    def wrong(self) -> list[str]:
        """Streams and restarts that were not as promised."""
        found = list(self.problems)
        if self.num_different > most_that_may_differ(self.num_streams):
            found.append(f"{self.num_different} of {self.num_streams} streams differ")
        if self.num_restarts < len(self.moments):
            found.append(f"{self.num_restarts} restarts for {len(self.moments)} losses")
        return found

    def missed(self) -> list[str]:
        """Moments that were aimed at and never met. (A stream that is opened just then may make a prompt's of
        a decoding's.)
        """
        aims = [moment for moment in MOMENTS if moment in self.moments]
        return [f"{moment}: not met" for moment in aims if not self.hits.get(moment)]

    def late(self) -> list[str]:
        """Times over what is promised."""
        most_s = statistics.median(self.cold_s) + _SLOWER_THAN_COLD_S
        bounds = [
            ("noticed", self.noticed_s, _NOTICED_S),
            ("noticed", self.timed_out_s, self.step_timeout_s),
            ("recovered", self.recovered_s, most_s),
        ]
        return [
            f"{what} after {max(over):.2f} s, allowed are {most:.2f} s ({len(over)} of {len(times)})"
            for what, times, most in bounds
            if (over := [time_s for time_s in times if time_s > most])
        ]

    def lines(self) -> list[str]:
        """For people."""
        aims = ", ".join(f"{moment} {self.moments.count(moment)}" for moment in MOMENTS)
        hits = ", ".join(f"{moment} {self.hits.get(moment, 0)}" for moment in MOMENTS)
        return [
            f"{self.way} at {self.tp} ranks, seed {self.seed}: {len(self.moments)} rounds, "
            f"{self.num_streams} streams, {self.num_different} different at ties, "
            f"{self.num_restarts} restarts, {self.num_replayed} sequences replayed",
            f"moments aimed at: {aims}; met: {hits}; losses nobody caused: {self.num_unasked}",
            f"killed or raised, noticed after (s): {spread(self.noticed_s)}",
            f"stopped or hung, noticed after (s):  {spread(self.timed_out_s)}",
            f"from there to the next token (s):    {spread(self.recovered_s)}",
            f"a cold start to a first token (s):   {spread(self.cold_s)}",
            *(f"note: {note}" for note in self.notes),
            *(f"FAILED {failure}" for failure in self.failures()),
        ]

    def to_dict(self) -> dict[str, Any]:
        """For machines: all samples, and what failed."""
        words = asdict(self)
        del words["damages"]
        return {**words, "failures": self.failures()}


def spread(values: Sequence[float]) -> str:
    """Least, median and most."""
    if not values:
        return "none"
    middle = statistics.median(values)
    return f"min {min(values):.2f}, median {middle:.2f}, max {max(values):.2f} (of {len(values)})"
