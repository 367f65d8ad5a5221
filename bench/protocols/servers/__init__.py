"""Each side's own program."""
