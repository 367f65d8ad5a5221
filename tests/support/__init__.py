"""What the tests of several folders share: one subject per module, and no tests.

What only one folder's tests need lies beside them. `tests/test_support.py` checks both.
"""
