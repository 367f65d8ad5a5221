"""The command `carpool score`."""
