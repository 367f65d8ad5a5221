"""The clients of a carpool server."""
