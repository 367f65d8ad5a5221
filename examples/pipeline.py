"""A pipeline of three stages in processes, from single items to batches, pinned to cores.

python -m examples.pipeline        sends handwritten digits as PGM files through all three stages
carpool serve examples.pipeline:service
curl --data-binary @digit.pgm -H 'content-type: image/x-portable-graymap' localhost:8000/predict
"""

import os

import numpy as np
from sklearn.decomposition import PCA
from sklearn.svm import SVC

import carpool
from examples.digits import halves

CORES = range(min(2, os.cpu_count() or 1))
Array = np.ndarray


class Decode(carpool.Model):
    """Turns a PGM file into 64 numbers. Without `max_batch_size`, `predict` gets one item."""

    def predict(self, body: bytes) -> Array:
        magic, size, depth, pixels = body.split(b"\n", 3)
        if (magic, size, depth) != (b"P5", b"8 8", b"16"):
            raise carpool.ValidationError("not a PGM file of 8 × 8 pixels with values up to 16")
        return np.frombuffer(pixels, np.uint8, 64).astype(float)


class Project(carpool.Model):
    """Turns images into 20 principal components. With `max_batch_size`, `predict` gets a list."""

    def setup(self) -> None:
        images, _, _, _ = halves()
        self.pca = PCA(20, random_state=0).fit(images)

    def predict(self, images: list[Array]) -> Array:
        points: Array = self.pca.transform(images)
        return points


class Classify(carpool.Model):
    """Says which digit the image shows. `kwargs` of the stage go to `__init__`."""

    def __init__(self, c: float) -> None:
        self.c = c

    def setup(self) -> None:
        images, labels, _, _ = halves()
        points = PCA(20, random_state=0).fit_transform(images)
        self.classifier = SVC(C=self.c).fit(points, labels)

    def predict(self, points: list[Array]) -> list[int]:
        digits: list[int] = self.classifier.predict(points).tolist()
        return digits

    def postprocess(self, digit: int) -> dict[str, int]:
        return {"digit": digit}


service = carpool.Service(
    carpool.Stage(Decode, cpus=[*CORES]),
    carpool.Stage(Project, max_batch_size=32, cpus=[CORES[-1]]),
    carpool.Stage(Classify, max_batch_size=64, kwargs={"c": 10.0}, cpus=[CORES[0]]),
    name="digits",
    timeout_s=10.0,
)


def as_pgm(image: Array) -> bytes:
    """Return an image of the data set as the bytes of a PGM file."""
    return b"P5\n8 8\n16\n" + image.astype(np.uint8).tobytes()


def main() -> None:
    """Classify the held-out half; print how many are right and how large the batches were."""
    _, _, images, labels = halves()
    with service.run() as s:
        answers = list(s.stream(as_pgm(image) for image in images))
        snapshot = s.stats()
    right = sum(answer["digit"] == label for answer, label in zip(answers, labels, strict=True))
    print(f"{right} of {len(labels)} right")
    for stage in snapshot.stages:
        print(f"{stage.name}: {stage.batches} calls of {stage.mean_batch_size:.1f} items on average")


if __name__ == "__main__":
    main()
