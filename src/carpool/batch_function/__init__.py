"""`@carpool.batch`: many callers of one function share its calls."""
