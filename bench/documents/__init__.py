"""The designs that carpool was made after, written anew from articles, and carpool beside each."""
