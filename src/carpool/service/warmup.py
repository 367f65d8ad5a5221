"""How many of a model's examples the warm-up of a worker runs at a time.

It uses several batch sizes, so that its timings can train the policy.
"""

from __future__ import annotations

from itertools import accumulate, cycle, islice

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
    return {n: n for n in sorted(sizes)}


def _weighed(stage: Stage, targets: list[int]) -> dict[int, int]:
    """Return the largest number of examples, but at least one, that fits into each target size."""
    weigh = weigher_of(stage)
    assert weigh is not None
    weights = []
    for i, example in enumerate(stage.traits.examples, 1):
        try:
            weights.append(weigh.of(example))
        except CarpoolError as error:
            raise StartupError(f"stage {stage.name} could not start: example {i} cannot be weighed: {error}") from error
    sums = list(accumulate(islice(cycle(weights), stage.max_queue_size)))
    counts = sorted({max(1, sum(total <= target for total in sums)) for target in targets})
    return {n: sums[n - 1] for n in counts}
