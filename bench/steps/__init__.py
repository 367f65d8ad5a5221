"""Answers in parts: what a step costs, what sharing steps is worth, SSE beside others."""
