"""What carpool itself costs, or one part of it, beside no peer."""
