"""The engine decides, and runs what was decided; it imports nothing of fronts and satellites."""
