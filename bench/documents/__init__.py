"""The designs that carpool was made after, written anew from the articles that show them, and carpool beside each."""
