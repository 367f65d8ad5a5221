"""Other servers of `bench gpu`, which run the same `Runner`."""
