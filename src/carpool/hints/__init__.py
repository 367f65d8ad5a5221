"""What type hints say about items: readers, writers, and what is wrong with what does not fit."""
