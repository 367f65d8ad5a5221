"""Callers bring arrays of different length: they are merged for one call, whose output is split.

python -m examples.arrays

First with dense arrays, which carpool knows how to merge, then with sparse ones, for which we say
how.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from scipy.sparse import csr_array, vstack
from sklearn.naive_bayes import MultinomialNB

import carpool
from examples.digits import halves

_IMAGES, _LABELS, IMAGES, LABELS = halves()
CHUNKS = [IMAGES[begin:end] for begin, end in pairwise([*accumulate(range(38)), len(IMAGES)])]  # 1, 2, … 37, 196 rows
classifier = MultinomialNB().fit(_IMAGES, _LABELS)
rows: list[int] = []


@carpool.batch(max_batch_size=128, merge=True)
def classify(images: np.ndarray) -> np.ndarray:
    """Return a digit for each row; a caller with more than 128 rows is served by several calls."""
    rows.append(images.shape[0])
    digits: np.ndarray = classifier.predict(images)
    return digits


def cut(digits: np.ndarray, counts: list[int]) -> list[np.ndarray]:
    """Return each caller's part of the digits."""
    return [digits[begin:end] for begin, end in pairwise(accumulate(counts, initial=0))]


@carpool.batch(max_batch_size=128, merge=vstack, split=cut, size=lambda images: images.shape[0])
def classify_sparse(images: csr_array) -> np.ndarray:
    """Do the same for sparse arrays, which have no `len`; a very large one gets its own call."""
    rows.append(images.shape[0])
    digits: np.ndarray = classifier.predict(images)
    return digits


def compare(name: str, function: Callable[[Any], np.ndarray], chunks: list[Any]) -> None:
    """Send the chunks from 16 threads, and compare with one call for all rows."""
    rows.clear()
    with ThreadPoolExecutor(16) as threads:
        digits = list(threads.map(function, chunks))
    right = all(len(part) == chunk.shape[0] for part, chunk in zip(digits, chunks, strict=True))
    others = (np.concatenate(digits) != classifier.predict(IMAGES)).sum()
    print(f"{name}: {len(chunks)} chunks, {sum(rows)} rows in {len(rows)} calls of {max(rows)} at the most;", end=" ")
    print(f"{others} digits differ, lengths are {'right' if right else 'wrong'}")


if __name__ == "__main__":
    compare("dense", classify, CHUNKS)
    compare("sparse", classify_sparse, [csr_array(chunk) for chunk in CHUNKS])
