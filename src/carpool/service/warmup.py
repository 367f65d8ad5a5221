"""How many of a model's examples a worker's warm-up runs at a time, so that its timings can train the policy."""

from __future__ import annotations

from itertools import accumulate, cycle, islice

from carpool.errors import CarpoolError, StartupError
from carpool.service.stage import Stage
from carpool.service.weigh import weigher_of

_SHARES = (4, 2, 1)  # of a full batch, besides a single item


def warm_up_sizes(stage: Stage) -> dict[int, int]:
    """Numbers of examples, rising, and the sum of their sizes; none where there are no examples or no batches.

    The examples are taken in turn, so that any number can be had: one, a quarter, half and all of a full batch, or each
    of the stage's allowed sizes.

    Raises:
        StartupError: an example cannot be weighed.
    """
    most = stage.max_batch_size
    if most is None or not stage.traits.examples:
        return {}
    policy = stage.new_policy()
    if stage.size is not None:
        return _weighed(stage, [1, *[max(1, policy.limit // share) for share in _SHARES]])
    sizes = policy.allowed_batch_sizes or {1, *[max(1, policy.limit // share) for share in _SHARES]}
    return {n: n for n in sorted(sizes)}


def _weighed(stage: Stage, targets: list[int]) -> dict[int, int]:
    """The most examples that fit into each target, and what they weigh; one at least."""
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
