"""mosec's server of the picture.  python mosec_side.py {digits|texts} --port PORT"""

import sys

from mosec import Server, Worker
from served_models import MODELS, SIZES

NAME = sys.argv[1]


class Model(Worker):
    def __init__(self) -> None:
        self.model = MODELS[NAME]()

    def forward(self, data: list) -> list:
        return self.model.predict(data)


if __name__ == "__main__":
    server = Server()
    server.append_worker(Model, max_batch_size=SIZES[NAME], timeout=60)
    server.run()
