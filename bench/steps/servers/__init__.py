"""The servers of `bench.steps.sse`: each answers `{"n": 3}` with the events `data: 1` to `data: 3`.

But for ours they run as scripts under their peer's Python, so no file here may bear the name of a
peer's package. BENCH_STEP_S says how long a step takes; 0 if nothing is said.
"""
