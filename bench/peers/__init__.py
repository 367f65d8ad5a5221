"""The peers: one tiny program each, and `install`, which makes an environment of its own for each of them.

The servers among them run as scripts under their peer's Python, so no file here may bear the name of a peer's package.
"""
