"""Type hints put to use: readers, writers and schemas of items, and what does not fit a type."""
