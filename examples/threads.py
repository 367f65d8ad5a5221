"""Threads of one program share calls of a model: no server, no process, and no extra thread.

python -m examples.threads      sixteen threads classify handwritten digits, one image at a time
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from sklearn.svm import SVC

import carpool
from examples.digits import halves

_IMAGES, _LABELS, IMAGES, LABELS = halves()
classifier = SVC(gamma=0.001).fit(_IMAGES, _LABELS)
sizes: list[int] = []


@carpool.batch(max_batch_size=64, timeout_s=10.0)
def classify(images: list[np.ndarray]) -> list[int]:
    """Return the digits on some images; one of the waiting threads runs this for all of them."""
    sizes.append(len(images))
    digits: list[int] = classifier.predict(np.array(images)).tolist()
    return digits


def main() -> None:
    """Classify the held-out half image by image, and compare with one call for all images."""
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(classify, IMAGES))
    right = sum(answer == label for answer, label in zip(answers, LABELS, strict=True))
    others = sum(a != b for a, b in zip(answers, classifier.predict(IMAGES), strict=True))
    print(f"{right} of {len(LABELS)} right, {others} different from one call for all")
    print(f"{len(sizes)} calls for {sum(sizes)} images, {max(sizes)} at the most")


if __name__ == "__main__":
    main()
