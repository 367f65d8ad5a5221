"""What programs of several folders use."""
