"""How many of a model's examples the warm-up of a worker runs at a time.

It uses several batch sizes, so that its timings can train the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, cycle, islice
from math import inf
from typing import Any

from carpool.engine.drive.worker import WarmUpShape
from carpool.engine.policy.length_cost import padded
from carpool.errors import CarpoolError, StartupError
from carpool.service.stage import Stage
from carpool.service.weigh import weigher_of

_SHARES = (4, 2, 1)  # warm up with a quarter, half and all of a full batch, besides a single item


def warm_up_sizes(stage: Stage) -> dict[int, int]:
    """Return the numbers of examples to run at a time, rising, each with the sum of their sizes.

    The examples are taken in turn, so that any number can be had. The numbers are those of one
    example and of a quarter, half and all of a full batch, or the stage's allowed batch sizes.
    There are none if the model has no examples or answers in parts, or the stage has no batches.

    Raises:
        StartupError: An example cannot be weighed.
    """
    most = stage.max_batch_size
    if most is None or not stage.traits.examples or stage.traits.in_parts:
        return {}
    policy = stage.new_policy()
    if stage.size is not None:
        return _weighed(stage, [1, *[max(1, policy.limit // share) for share in _SHARES]])
    sizes = policy.allowed_batch_sizes or {1, *[max(1, policy.limit // share) for share in _SHARES]}
    if stage.max_padded_size is not None:
        longest = max(_lengths_of_examples(stage))
        sizes = {1, *[n for n in sizes if n * longest <= stage.max_padded_size]}
    return {n: n for n in sorted(sizes)}


def warm_up_shapes(stage: Stage) -> tuple[WarmUpShape, ...]:
    """Return the calls with one example over and over that show what lengths cost.

    They are of the shortest, the middle and the longest example; of a model that pads to certain
    lengths, of one for each of these. There are none without `length=`.

    Raises:
        StartupError: The length of an example cannot be found.
    """
    if stage.length is None or not stage.traits.examples or stage.max_batch_size is None:
        return ()
    lengths: dict[int, int] = {}  # with an example of each
    for at, length in enumerate(_lengths_of_examples(stage)):
        lengths.setdefault(length, at)
    rising = sorted(lengths)
    if stage.allowed_lengths is not None:
        allowed = stage.allowed_lengths
        chosen = sorted({padded(length, allowed): length for length in rising}.values())
    else:
        chosen = sorted({rising[0], rising[len(rising) // 2], rising[-1]})
    counts = stage.allowed_batch_sizes or sorted({1, max(1, stage.max_batch_size // 4), stage.max_batch_size})
    most_padded = stage.max_padded_size or inf
    return tuple(
        WarmUpShape(lengths[length], n, length)
        for length in chosen
        for n in counts
        if n == 1 or n * length <= most_padded
    )


def _lengths_of_examples(stage: Stage) -> list[int]:
    """Return how long each example is. Raises StartupError if that of one cannot be found."""
    weigher = weigher_of(stage)
    assert weigher is not None
    return _of_each_example(stage, weigher.length_of, "the length of example {} cannot be told")


def _weighed(stage: Stage, targets: list[int]) -> dict[int, int]:
    """Return the largest number of examples, but at least one, that fits into each target size."""
    weigher = weigher_of(stage)
    assert weigher is not None
    weights = _of_each_example(stage, weigher.of, "example {} cannot be weighed")
    sums = list(accumulate(islice(cycle(weights), stage.max_queue_size)))
    counts = sorted({max(1, sum(total <= target for total in sums)) for target in targets})
    return {n: sums[n - 1] for n in counts}


def _of_each_example(stage: Stage, measure: Callable[[Any], int], trouble: str) -> list[int]:
    """Measure each example of a stage. Raises StartupError if one cannot be measured."""
    measures = []
    for i, example in enumerate(stage.traits.examples, 1):
        try:
            measures.append(measure(example))
        except CarpoolError as error:
            raise StartupError(f"stage {stage.name} could not start: {trouble.format(i)}: {error}") from error
    return measures
