"""Files of measured costs: what `carpool profile` writes, and `simulate` and `plan` read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec


class StageCosts(msgspec.Struct, frozen=True):
    """What the batches of one stage cost.

    Attributes:
        stage: The name of the stage.
        max_batch_size: The largest batch that it makes.
        seconds: The seconds of a worker for a batch, by its size.
    """

    stage: str
    max_batch_size: int
    seconds: dict[int, float]

    @property
    def spec(self) -> str:
        """The costs as `simulate` takes them in one word."""
        return "table:" + ",".join(f"{size}={seconds * 1e6:.0f}us" for size, seconds in sorted(self.seconds.items()))


class _CostFile(msgspec.Struct):
    service: str
    stages: list[StageCosts]
    is_line: bool = True


def write_costs(path: Path, service: str, stages: list[StageCosts], *, is_line: bool = True) -> None:
    """Write the costs of a service's stages, first to last. Raises OSError."""
    path.write_bytes(costs_as_json(service, stages, is_line=is_line) + b"\n")


def costs_as_json(service: str, stages: list[StageCosts], *, is_line: bool = True) -> bytes:
    """Return what such a file holds; `is_line` says whether the stages stand in a row."""
    return msgspec.json.format(msgspec.json.encode(_CostFile(service, stages, is_line)))


def read_costs(path: Path, *, may_branch: bool = False) -> list[StageCosts]:
    """Return the costs of a service's stages, in the order in which they are written.

    Args:
        path: The file.
        may_branch: Whether the stages need not stand in a row.

    Raises:
        ValueError: It has none, or they are of stages that do not stand in a row.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_CostFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path} cannot be read as a file of costs, which carpool profile writes: {error}") from None
    found = file.stages
    if not file.is_line and not may_branch:
        raise ValueError(
            f"{path} has the costs of a graph, service {file.service}: use carpool simulate --service MODULE:SERVICE"
            f" --cost {path}; carpool plan is for stages in a row"
        )
    if not found or not all(stage.seconds for stage in found):
        raise ValueError(f"{path} has no costs: make it with carpool profile module:service --out {path}")
    return found


def given_costs(given: list[str] | None, usual: str) -> tuple[list[str], list[int] | None]:
    """Return the specs of costs as given on a command line, and the batch limits if they are known.

    Args:
        given: A spec for each stage, or one file of costs for all of them; None for the usual one.
        usual: The spec that counts if none is given.

    Raises:
        ValueError: The file cannot be read, or there is something beside it.
    """
    if not given:
        return [usual], None
    files = [each for each in given if each.endswith(".json")]
    if not files:
        return given, None
    if len(given) > 1:
        raise ValueError(f"--cost {files[0]} has the costs of all stages: give no other --cost beside it")
    stages = read_costs(Path(files[0]))
    return [stage.spec for stage in stages], [stage.max_batch_size for stage in stages]


def costs_by_stage(given: list[str] | None, usual: str, stages: Sequence[str]) -> dict[str, str]:
    """Return the spec of the cost of each stage of a graph, by its name.

    Args:
        given: A file of costs; or `STAGE=spec` for each stage; or a spec for all of them; None for
            the usual one.
        usual: The spec that counts if none is given.
        stages: The names of the stages.

    Raises:
        ValueError: The file cannot be read, or several are given of which one names no stage.
    """
    if given and given[0].endswith(".json"):
        if len(given) > 1:
            raise ValueError(f"--cost {given[0]} has the costs of all stages: give no other --cost beside it")
        return {costs.stage: costs.spec for costs in read_costs(Path(given[0]), may_branch=True)}
    named = [each.partition("=") for each in given or ()]
    if all(name in stages for name, *_ in named) and named:
        return {name: spec for name, _, spec in named}
    if len(named) > 1:
        name = next(name for name, *_ in named if name not in stages)
        raise ValueError(f"--cost {name}=…: there is no stage {name!r}; there are {', '.join(stages)}")
    return dict.fromkeys(stages, (given or [usual])[0])
