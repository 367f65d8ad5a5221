"""carpool on a Ray cluster of one node, beside Ray Serve and beside carpool's own processes."""
