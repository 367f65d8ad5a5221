"""Answers in parts: what a step costs, what sharing steps is worth, and SSE beside other servers."""
