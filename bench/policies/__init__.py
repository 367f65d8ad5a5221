"""All policies beside each other, in virtual time."""
