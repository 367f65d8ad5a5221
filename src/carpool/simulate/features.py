"""How the requests of a run differ from each other: in weight, in length and by key."""

from __future__ import annotations

from typing import Any, NamedTuple

from carpool.simulate.keys import Keys, keys_of
from carpool.simulate.lengths import Lengths, lengths_of
from carpool.simulate.weights import Weights, weights_of


class Features(NamedTuple):
    """How requests differ.

    Attributes:
        weights: The weights of requests that bring none; None where these weigh 1.
        weights_known: Whether the core is told the weights, as sizes.
        lengths: The lengths of requests that bring none; None where these have none.
        lengths_known: Whether the core is told the lengths.
        keys: The keys of requests; None where all may share a batch.
    """

    weights: Weights | None = None
    weights_known: bool = False
    lengths: Lengths | None = None
    lengths_known: bool = True
    keys: Keys | None = None

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Features:
        """Return the features among settings of a run, which may be given as specs.

        Raises:
            ValueError: A spec is wrong; the text says what to change.
            TypeError: A setting is of a wrong kind.
        """
        lengths = settings.get("lengths")
        return cls(
            weights=weights_of(settings.get("weights")),
            weights_known=settings.get("weights_known", False),
            lengths=None if lengths is None else lengths_of(lengths),
            lengths_known=settings.get("lengths_known", True),
            keys=keys_of(settings.get("keys")),
        )


ALIKE = Features()
"""Requests that do not differ."""
