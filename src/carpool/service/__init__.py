"""Services from declaration to handle: stages and settings, their assembly, and running services."""
