"""What carpool does on a card: `python -m bench gpu --help`, and README.md beside this."""
