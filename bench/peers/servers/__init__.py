"""The sides of the comparisons: a tiny program for each peer, ours, and those of the limits.

The servers among them run as scripts under their peer's Python, so no file here may bear the name
of a peer's package.
"""
