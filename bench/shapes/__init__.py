"""Batches composed by length, where batches are padded to their longest: rules, and how good they are."""
