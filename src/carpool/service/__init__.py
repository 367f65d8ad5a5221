"""Services: their declaration, their assembly, and the handles of running ones."""
