"""How long the batches of one stage take, by what was seen. Sans-IO."""

from __future__ import annotations

_FADING = 0.998  # what is left of a learned gap after each batch that does not show it


class BatchTimes:
    """Smoothed times of the batches of one stage.

    Attributes:
        usual_s: Smoothed seconds of a batch; 0 while none has run.
        deviation_s: Smoothed distance of calls from what they usually take. It goes by what workers
            say, since two replies may lie together when a busy service comes to read them. It is
            kept only where it is needed.
        fastest_s: The least seconds of a batch lately; never more than `usual_s`.
        hop_s: Smoothed seconds that a batch spends on its way to the worker and back.
        gap_s: Smoothed seconds that a worker is idle between two batches of which none goes ahead.
            It is kept only where batches may go ahead.
    """

    __slots__ = ("_usual_busy_s", "deviation_s", "fastest_s", "gap_s", "hop_s", "usual_s")

    def __init__(self) -> None:
        self.usual_s = 0.0
        self.deviation_s = 0.0
        self.fastest_s = 0.0
        self.hop_s = self.gap_s = 0.0
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

    def learn_gap(self, took_s: float, busy_s: float, went_ahead: bool) -> None:
        """Learn from the time that a batch was on its way, which its worker spent idle.

        What is known fades while all batches go ahead, so that it is looked at again now and then.
        A stall teaches no more than a gap as long as the batch would.
        """
        if went_ahead:
            self.gap_s *= _FADING
        else:
            self.gap_s += 0.1 * (max(0.0, min(took_s - busy_s, busy_s)) - self.gap_s)
