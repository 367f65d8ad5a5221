"""LitServe's server of the picture.  python litserve_side.py {digits|texts} PORT"""

import sys

import litserve
from served_models import MODELS, SIZES

NAME = sys.argv[1]


class Model(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.model = MODELS[NAME]()

    def decode_request(self, request: dict) -> object:
        return request["x"]

    def predict(self, xs: list) -> list:
        return self.model.predict(xs)

    def encode_response(self, output: object) -> dict:
        return {"y": output}


if __name__ == "__main__":
    server = litserve.LitServer(Model(max_batch_size=SIZES[NAME]), timeout=60)
    server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False)
