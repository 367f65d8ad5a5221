"""What every server of the soak is given: workers, batch size, times and limits."""

WORKERS = 4
BATCH = 32
QUEUE = 16_384
TIMEOUT_S = 10.0  # of a request
HANG_S = 1.0  # of one call
MAX_BODY_MB = 2
WORKER_FAULT = "CHAOS_WORKER_FAULT"  # names the variable that becomes CARPOOL_FAULT in carpool's workers only
