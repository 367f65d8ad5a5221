"""How long the batches of one stage take, by what was seen. Sans-IO."""

from __future__ import annotations


class BatchTimes:
    """Smoothed times of the batches of one stage.

    Attributes:
        usual_s: Smoothed seconds of a batch; 0 while none has run.
        deviation_s: Smoothed distance of batches from that; it is kept only where it is needed.
        fastest_s: The least seconds of a batch lately; never more than `usual_s`.
    """

    __slots__ = ("deviation_s", "fastest_s", "usual_s")

    def __init__(self) -> None:
        self.usual_s = 0.0
        self.deviation_s = 0.0
        self.fastest_s = 0.0

    def learn(self, took_s: float) -> None:
        """Learn from a batch that took `took_s`."""
        self.usual_s += (took_s - self.usual_s) * (0.2 if self.usual_s else 1.0)
        if took_s < self.fastest_s or not self.fastest_s:
            self.fastest_s = took_s
        else:
            self.fastest_s += 0.01 * (took_s - self.fastest_s)  # the stage may have become slower

    def learn_deviation(self, took_s: float) -> None:
        """Learn how far a batch is from the usual time; to be called before `learn`."""
        if self.usual_s:
            self.deviation_s += (abs(took_s - self.usual_s) - self.deviation_s) * 0.2
