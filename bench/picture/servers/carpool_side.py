"""carpool's services of the picture: its defaults, and how long a text is."""

from __future__ import annotations

import carpool
from bench.picture.servers.served_models import SIZES
from bench.picture.servers.served_models import Digits as DigitsModel
from bench.picture.servers.served_models import Texts as TextsModel


class Digits(carpool.Model):
    """Recognises digits."""

    def setup(self) -> None:
        self.model = DigitsModel()

    def predict(self, images: list[list[float]]) -> list[int]:
        return self.model.predict(images)


class Texts(carpool.Model):
    """Makes vectors of texts."""

    def setup(self) -> None:
        self.model = TextsModel()

    def predict(self, texts: list[str]) -> list[list[float]]:
        return self.model.predict(texts)


digits = carpool.Service(carpool.Stage(Digits, max_batch_size=SIZES["digits"]))
texts = carpool.Service(carpool.Stage(Texts, max_batch_size=SIZES["texts"], length=lambda text: len(text.split()) + 2))
