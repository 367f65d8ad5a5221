"""Clients that nobody here wrote, against a carpool server: `make conformance`."""
