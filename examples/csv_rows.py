r"""A format of your own: one call parses a hundred CSV requests, and one call writes their answers.

carpool serve examples.csv_rows:service
curl -H 'content-type: text/csv' localhost:8000/predict \
    -d '0.03,0.05,0.06,0.02,-0.04,-0.03,-0.04,-0.002,0.02,-0.01'
"""

import io

import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression

import carpool


class Progression(carpool.Model):
    """Predicts from ten measurements how far diabetes will have progressed in a year."""

    accepts = ("text/csv",)
    produces = "text/csv"
    examples = ([0.0] * 10,)

    def setup(self) -> None:
        self.regression = LinearRegression().fit(*load_diabetes(return_X_y=True))

    def decode(self, bodies: list[bytes]) -> np.ndarray:
        """Parse all rows at once; if this raises ValueError, carpool finds the bad row."""
        rows = np.loadtxt(io.BytesIO(b"\n".join(bodies)), delimiter=",", ndmin=2)
        if rows.shape != (len(bodies), 10):
            raise ValueError("each body must be one row of ten numbers")
        return rows

    def predict(self, rows: list[list[float]]) -> list[float]:
        answers: list[float] = self.regression.predict(np.asarray(rows)).tolist()
        return answers

    def encode(self, results: list[float]) -> list[bytes]:
        """Write one line for each answer."""
        return [b"%.1f\n" % result for result in results]


service = carpool.Service(carpool.Stage(Progression, max_batch_size=100), name="progression")
