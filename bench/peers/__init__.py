"""carpool beside its peers; `install` makes an environment of its own for each of them."""
