"""A service as it is declared, assembled and run: stages, settings, handles."""
