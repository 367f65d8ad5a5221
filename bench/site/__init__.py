"""Makes the site of the documentation from pages, files to deploy with, examples and docstrings."""
