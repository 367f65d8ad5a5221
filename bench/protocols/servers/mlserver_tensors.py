"""MLServer of `bench.protocols.tensors`: tensors come back as they were.

    python mlserver_tensors.py PORT

The model runs in the server itself: with the newest uvloop, workers of MLServer do not start.
"""

import asyncio
import sys

from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput


class Same(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        (tensor,) = payload.inputs
        output = ResponseOutput(name="output", datatype=tensor.datatype, shape=tensor.shape, data=tensor.data)
        return InferenceResponse(model_name=self.name, outputs=[output])


async def main(port: int) -> None:
    settings = Settings(
        host="127.0.0.1", http_port=port, grpc_port=port + 1, metrics_endpoint=None, parallel_workers=0, debug=False
    )
    server = MLServer(settings)
    await server.start([ModelSettings(name="tensors", implementation=Same)])


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
