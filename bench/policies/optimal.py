"""The least mean latency that any policy can have for Poisson arrivals, and the policy that has it.

This holds for one worker, a known cost t(n) without noise, and no SLO. How many requests wait when
the worker is free is then all that matters, so the best decisions are a table. It comes from the
semi-Markov decision process of Deb & Serfozo, "Optimal control of batch service queues" (1973),
here with times that depend on the batch, and is found by policy iteration (Howard 1960; Puterman,
"Markov Decision Processes", 1994, section 11.4). The cost rate is the number of requests in the
system, which by Little's law is the mean latency times the arrival rate.

A decision is made when a batch ends and when a request arrives at an idle worker: run n of the x
that wait, or wait for one more. Queues are cut off at a length that is doubled until the result no
longer depends on it.

The other bound is on goodput: the number of requests that a scheduler which has all arrivals
beforehand (`clairvoyant_attainment`) answers in time. No policy can do better. The bound holds for
one worker, for a known cost without noise that does not fall with the batch size, and for requests
that are due in the order in which they arrive (one SLO for all).

Such a scheduler loses nothing if it serves in order, and leaves out the requests that it drops
before a batch and not inside it: if of two requests the earlier one is served and the later one is
dropped, the later one can take the earlier one's place in any batch that also holds a request after
both. So a schedule is a row of drops and of batches of consecutive requests, and all that matters
of it after i requests is how many it has dropped and when the worker is free. The dynamic programme
keeps, for every i and every number of drops, the earliest such time; this is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf, lgamma, sqrt

import numpy as np

from carpool.engine.policy.base import NOTHING, Decision, Policy, View

_TOLERANCE = 1e-7  # relative change of the mean latency when the longest queue is doubled
_LONGEST_QUEUE = 2048  # beyond it the equations take minutes
_NO_GAIN = 1e-11  # an action must be better by this share to replace another


@dataclass(frozen=True, slots=True)
class Optimum:
    """The solution of one decision process.

    Attributes:
        mean_s: The mean latency of a request, in seconds.
        batch_sizes: How many requests to run now, by the number of requests that wait; 0 means to
            wait for one more.
    """

    mean_s: float
    batch_sizes: tuple[int, ...]


class Optimal(Policy):
    """A policy that follows the table of an optimum, to be simulated beside the other policies.

    Args:
        batch_sizes: How many requests to run, by the number of requests that wait. The last entry
            also stands for all larger numbers.
        max_batch_size: As for every policy.
        max_queue_delay_s: The time after which requests go although the table would wait for more,
            for the sake of the last ones of a run. It should be so long that further requests
            almost surely come before it is over.
    """

    def __init__(
        self, batch_sizes: Sequence[int], max_batch_size: int | None = None, max_queue_delay_s: float | None = None
    ) -> None:
        super().__init__(max_batch_size, max_queue_delay_s)
        self._batch_sizes = batch_sizes

    def decide(self, view: View) -> Decision:
        now, queue = view.now, view.queue
        waiting = len(queue)
        if not view.free or not waiting:
            return NOTHING
        n = self._batch_sizes[min(waiting, len(self._batch_sizes) - 1)]
        if n:
            return Decision(take=n, reason="table")
        if self.max_queue_delay_s is None:
            return NOTHING
        last_call = queue.oldest_arrival + self.max_queue_delay_s
        return Decision(wake_at=last_call) if now < last_call else Decision(take=waiting, reason="delay")


def optimal_mean_latency(cost_s: Callable[[int], float], rate: float, max_batch_size: int) -> Optimum:
    """Find the least mean latency and the decisions that reach it.

    Args:
        cost_s: The function from a number of requests to the seconds that a batch of them takes.
        rate: The requests per second of the Poisson process.
        max_batch_size: The most requests that one batch may hold.

    Raises:
        ValueError: The rate is not below the capacity, so that no policy has a finite mean latency,
            or it is so near to the capacity that the queue cannot be cut off.
    """
    seconds = np.array([cost_s(n) for n in range(1, max_batch_size + 1)])
    capacity = float(np.max(np.arange(1, max_batch_size + 1) / seconds))
    if not 0 < rate < capacity:
        raise ValueError(f"rate must be above 0 and below the capacity of {capacity:.6g} requests/s, got {rate:.6g}")
    process = _Process(seconds, rate, longest=4 * max_batch_size + ceil(2 * rate * float(seconds[-1])))
    policy = process.solve(process.greedy())
    mean_s = process.mean_number / rate
    while process.longest < _LONGEST_QUEUE:
        wider = _Process(seconds, rate, longest=2 * process.longest)
        policy = wider.solve(wider.extended(policy))
        before_s, mean_s = mean_s, wider.mean_number / rate
        if abs(mean_s - before_s) <= _TOLERANCE * mean_s:
            return Optimum(mean_s, tuple(int(n) for n in policy[: process.longest + 1]))
        process = wider
    raise ValueError(f"a rate of {rate:.6g} requests/s is too near to the capacity of {capacity:.6g}: lower it")


class _Process:
    """The decision process with the number of waiting requests, at most `longest`, as its state.

    Requests that arrive at a full queue are lost.
    """

    def __init__(self, seconds: np.ndarray, rate: float, longest: int) -> None:
        self.seconds = seconds
        self.rate = rate
        self.longest = longest
        self.mean_number = inf  # of requests in the system
        self._waiting = np.arange(longest + 1)
        self._arrivals = [_poisson(rate * float(t)) for t in seconds]

    def greedy(self) -> np.ndarray:
        """Return the policy that always runs whatever waits, with which the iteration starts."""
        return np.minimum(self._waiting, len(self.seconds))

    def extended(self, policy: np.ndarray) -> np.ndarray:
        """Return the policy of a shorter process, continued for the longer queues of this one."""
        return np.concatenate([policy, np.full(self.longest + 1 - len(policy), policy[-1])])

    def solve(self, policy: np.ndarray) -> np.ndarray:
        """Improve the policy until no other one is better, return it and set `mean_number`."""
        while True:
            values, self.mean_number = self._evaluate(policy)
            better = self._improve(policy, values)
            if np.array_equal(better, policy):
                return policy
            policy = better

    def _evaluate(self, policy: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the relative values of the states, and the mean number in the system.

        Both hold under the policy. The value of state 0 is 0, and for every state x
        value(x) = number·time spent − mean·time + E[value of the next state].
        """
        states = self.longest + 1
        chain = np.zeros((states, states))
        for x, n in enumerate(policy):
            if n == 0:
                chain[x, x + 1] = 1.0
            else:
                arrivals = self._arrivals[n - 1][: states - (x - n)]
                chain[x, x - n : x - n + len(arrivals)] = arrivals
                chain[x, -1] += 1.0 - arrivals.sum()
        time, number = self._time(policy), self._number(policy)
        equations = np.eye(states) - chain
        equations[:, 0] = time  # the value of state 0 is 0, so its place is free for the mean
        solution = np.linalg.solve(equations, number)
        return np.concatenate([[0.0], solution[1:]]), float(solution[0])

    def _improve(self, policy: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return the best action in each state, if `values` hold from the next state on."""
        best = self._worth_waiting(values)
        actions = np.zeros_like(policy)
        kept = np.where(policy == 0, best, np.inf)
        for n in range(1, len(self.seconds) + 1):
            worth = self._worth(n, values)
            kept = np.where(policy == n, worth, kept)
            actions = np.where(worth < best, n, actions)
            best = np.minimum(best, worth)
        return np.where(best < kept - _NO_GAIN * (1.0 + np.abs(kept)), actions, policy)

    def _worth_waiting(self, values: np.ndarray) -> np.ndarray:
        """Return the value of waiting for one more, by state; the longest queue cannot wait."""
        worth = (self._waiting - self.mean_number) / self.rate
        return np.append(worth[:-1] + values[1:], np.inf)

    def _worth(self, n: int, values: np.ndarray) -> np.ndarray:
        """Return the value of running n requests, by state; infinite where fewer than n wait."""
        seconds, arrivals = self.seconds[n - 1], self._arrivals[n - 1]
        beyond = np.full(len(arrivals) - 1, values[-1])
        following = np.correlate(np.concatenate([values, beyond]), arrivals, mode="valid")  # by x - n, what is left
        following += (1.0 - arrivals.sum()) * values[-1]
        spent = (self._waiting + self.rate * seconds / 2 - self.mean_number) * seconds
        return np.concatenate([np.full(n, np.inf), spent[n:] + following[: self.longest + 1 - n]])

    def _time(self, policy: np.ndarray) -> np.ndarray:
        """Return the expected seconds in each state."""
        time: np.ndarray = np.where(policy == 0, 1.0 / self.rate, self.seconds[np.maximum(policy, 1) - 1])
        return time

    def _number(self, policy: np.ndarray) -> np.ndarray:
        """Return the expected request-seconds in each state.

        Requests count that wait or run, and those that arrive in the meantime.
        """
        time = self._time(policy)
        arriving = np.where(policy == 0, 0.0, self.rate * time / 2)
        number: np.ndarray = (self._waiting + arriving) * time
        return number


def _poisson(mean: float) -> np.ndarray:
    """Return the probabilities of 0, 1, 2 … events, until the rest is lost in rounding."""
    most = ceil(mean + 12 * sqrt(mean) + 40)
    k = np.arange(most + 1)
    log_factorial = np.array([lgamma(i + 1) for i in k])
    probabilities: np.ndarray = np.exp(k * np.log(mean) - mean - log_factorial)
    return probabilities


_ROUNDING_S = 1e-9  # a request that ends this much after it was due is in time


def clairvoyant_attainment(
    arrivals: Sequence[float], dues: Sequence[float], cost_s: Callable[[int], float], max_batch_size: int
) -> float:
    """Return the largest share of the requests that can be answered by the time they are due.

    Args:
        arrivals: When each request arrives, in seconds and in order.
        dues: When the answer to each request is due, in seconds and in order.
        cost_s: The function from a number of requests to the seconds that a batch of them takes.
        max_batch_size: The most requests that one batch may hold.

    Raises:
        ValueError: Times are not in order, or there are none, or a larger batch costs less than a
            smaller one.
    """
    if not len(arrivals) or len(arrivals) != len(dues):
        raise ValueError(f"arrivals and dues must have the same length, above 0: got {len(arrivals)} and {len(dues)}")
    if np.any(np.diff(arrivals) < 0) or np.any(np.diff(dues) < 0):
        raise ValueError("arrivals and dues must both rise: the bound holds for one SLO for all requests")
    seconds = np.array([cost_s(n) for n in range(1, max_batch_size + 1)])
    if np.any(np.diff(seconds) < 0):
        raise ValueError("the cost must not fall with the batch size: the bound does not hold where padding pays")
    return 1.0 - _fewest_drops(np.asarray(arrivals), np.asarray(dues), seconds) / len(arrivals)


def _fewest_drops(arrivals: np.ndarray, dues: np.ndarray, seconds: np.ndarray) -> int:
    """Return how many of the requests must be dropped at least.

    Row i of `free_at` holds, by the number of drops among the first i requests, when the worker can
    be free at the earliest. A row is used again once no later request refers to it.
    """
    total, rows = len(arrivals), len(seconds) + 1
    free_at = np.full((rows, total + 1), np.inf)
    free_at[0, 0] = -np.inf
    fewest = 0
    for i in range(total):
        row = free_at[i % rows]
        fewest += int(np.argmax(row[fewest:] < np.inf))
        useful = _useful(row[fewest:], arrivals[i])
        drops = slice(fewest, fewest + len(useful))
        n = min(len(seconds), total - i)
        ends = np.maximum(useful, arrivals[i : i + n, None]) + seconds[:n, None]
        ends[ends > dues[i] + _ROUNDING_S] = np.inf
        row[:] = np.inf
        targets = np.arange(i + 1, i + n + 1) % rows
        free_at[targets, drops] = np.minimum(free_at[targets, drops], ends)
        dropped = free_at[(i + 1) % rows, fewest + 1 : fewest + 1 + len(useful)]
        np.minimum(dropped, useful, out=dropped)
    return fewest + int(np.argmax(free_at[total % rows][fewest:] < np.inf))


def _useful(free_at: np.ndarray, next_arrival: float) -> np.ndarray:
    """Return the part of a row that is worth going on from.

    Once the worker is free before the next request arrives, further drops gain nothing.
    """
    enough = free_at <= next_arrival
    end = int(np.argmax(enough)) + 1 if enough.any() else len(free_at)
    useful: np.ndarray = free_at[:end].copy()
    return useful
