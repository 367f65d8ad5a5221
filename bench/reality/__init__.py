"""The simulator beside real servers under open-loop load."""
