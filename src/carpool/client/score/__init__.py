"""`carpool score`: a model over a file of rows, from the command line."""
