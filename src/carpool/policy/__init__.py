"""Policies decide when a batch goes, with how many requests, and which requests to drop.

There is one idea per file, and all are behind the five calls of `Policy`.
"""

from __future__ import annotations

from carpool.policy.adapted import adapted
from carpool.policy.adaptive import Adaptive
from carpool.policy.aimd import AIMD
from carpool.policy.base import Decision, DoneBatch, Policy, QueueView, View
from carpool.policy.cork import Cork
from carpool.policy.deadline import Deadline
from carpool.policy.greedy import Greedy
from carpool.policy.maker import BY_NAME, STEPS_BY_NAME, PolicyName, limit, new_policy, new_step_policy
from carpool.policy.one_by_one import OneByOne
from carpool.policy.paced import Paced
from carpool.policy.static import Static
from carpool.policy.steps import GreedySteps, SetView, StaticSteps, Stepped, StepPolicy

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
