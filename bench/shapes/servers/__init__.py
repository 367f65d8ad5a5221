"""The servers of `bench.shapes.http`, each of which serves the same sentence-embedding model."""
