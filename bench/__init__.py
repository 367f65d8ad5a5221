"""Benchmarks: carpool beside its peers, on one machine, in one run. `README.md` says how to repeat them."""
