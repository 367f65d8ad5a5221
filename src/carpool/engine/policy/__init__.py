"""Policies decide when a batch goes, with how many requests, and which requests to drop.

There is one idea per file, and all are behind the five calls of `Policy`.
"""

from __future__ import annotations

from carpool.engine.policy.adapted import adapted
from carpool.engine.policy.adaptive import Adaptive
from carpool.engine.policy.aimd import AIMD
from carpool.engine.policy.base import Decision, DoneBatch, Policy, QueueView, View
from carpool.engine.policy.cork import Cork
from carpool.engine.policy.deadline import Deadline
from carpool.engine.policy.greedy import Greedy
from carpool.engine.policy.maker import BY_NAME, STEPS_BY_NAME, PolicyName, limit, new_policy, new_step_policy
from carpool.engine.policy.one_by_one import OneByOne
from carpool.engine.policy.paced import Paced
from carpool.engine.policy.static import Static
from carpool.engine.policy.steps import GreedySteps, SetView, StaticSteps, Stepped, StepPolicy

__all__ = [
    "AIMD",
    "BY_NAME",
    "STEPS_BY_NAME",
    "Adaptive",
    "Cork",
    "Deadline",
    "Decision",
    "DoneBatch",
    "Greedy",
    "GreedySteps",
    "OneByOne",
    "Paced",
    "Policy",
    "PolicyName",
    "QueueView",
    "SetView",
    "Static",
    "StaticSteps",
    "StepPolicy",
    "Stepped",
    "View",
    "adapted",
    "limit",
    "new_policy",
    "new_step_policy",
]
