"""The peers: one tiny server each, and `install`, which makes an environment of its own for each of them.

The servers run as scripts under their peer's Python, so no file here may bear the name of a peer's package.
"""
