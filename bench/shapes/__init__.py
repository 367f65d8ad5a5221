"""Batches composed by length, where they are padded to their longest: how good the rules are."""
