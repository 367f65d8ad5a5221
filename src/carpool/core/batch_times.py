"""How long the batches of one stage take, by what was seen. Sans-IO."""

from __future__ import annotations


class BatchTimes:
    """Smoothed times of the batches of one stage.

    Attributes:
        usual_s: Smoothed seconds of a batch; 0 while none has run.
        deviation_s: Smoothed distance of calls from what they usually take. It goes by what workers
            say, since two replies may lie together when a busy service comes to read them. It is
            kept only where it is needed.
        fastest_s: The least seconds of a batch lately; never more than `usual_s`.
    """

    __slots__ = ("_usual_busy_s", "deviation_s", "fastest_s", "usual_s")

    def __init__(self) -> None:
        self.usual_s = 0.0
        self.deviation_s = 0.0
        self.fastest_s = 0.0
        self._usual_busy_s = 0.0

    def learn(self, took_s: float) -> None:
        """Learn from a batch that took `took_s`."""
        self.usual_s += (took_s - self.usual_s) * (0.2 if self.usual_s else 1.0)
        if took_s < self.fastest_s or not self.fastest_s:
            self.fastest_s = took_s
        else:
            self.fastest_s += 0.01 * (took_s - self.fastest_s)  # the stage may have become slower

    def learn_deviation(self, busy_s: float) -> None:
        """Learn from a batch on which its worker has spent `busy_s`."""
        distance_s = busy_s - self._usual_busy_s
        if not self._usual_busy_s:
            self._usual_busy_s = busy_s
            return
        self.deviation_s += (abs(distance_s) - self.deviation_s) * 0.2
        self._usual_busy_s += distance_s * 0.2
