"""LitServe's server of `bench.peers.http`.  python litserve_server.py PORT

It serves no raw bodies: LitServe reads a request as JSON or as a form, whatever its content type.
"""

import sys

import litserve


class Double(litserve.LitAPI):
    def setup(self, device: str) -> None:
        """LitServe wants one."""

    def decode_request(self, request: dict[str, float]) -> float:
        return request["x"]

    def predict(self, xs: list[float]) -> list[float]:
        return [2 * x for x in xs]

    def encode_response(self, output: float) -> dict[str, float]:
        return {"y": output}


if __name__ == "__main__":
    server = litserve.LitServer(Double(max_batch_size=64))
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False)
