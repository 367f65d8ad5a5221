"""LitServe with the witness as its model.

    python litserve_service.py PORT WORKERS BATCH TIMEOUT_S MAX_BODY

starts it on 127.0.0.1.
"""

import sys

import litserve
from witness import Witness


class Witnessed(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self._witness = Witness()

    def decode_request(self, request: dict) -> dict:
        return request

    def predict(self, xs: list[dict]) -> list[dict]:
        return self._witness.answer(xs)

    def encode_response(self, output: dict) -> dict:
        return output


if __name__ == "__main__":
    port, workers, batch, timeout_s, max_body = sys.argv[1:]
    server = litserve.LitServer(
        Witnessed(max_batch_size=int(batch)),
        accelerator="cpu",
        workers_per_device=int(workers),
        timeout=float(timeout_s),
        max_payload_size=int(max_body),
        restart_workers=True,
    )
    server.run(host="127.0.0.1", port=int(port), generate_client_file=False, log_level="warning")
