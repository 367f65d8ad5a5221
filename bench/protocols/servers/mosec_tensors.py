"""mosec's server of `bench.protocols.tensors`: arrays in msgpack, which come back as they were.

    python mosec_tensors.py --address 127.0.0.1 --port PORT

mosec reads its options from the command line itself.
"""

from mosec import Server, Worker
from mosec.mixin import MsgpackMixin


class Same(MsgpackMixin, Worker):
    def forward(self, data):
        return data


if __name__ == "__main__":
    server = Server()
    server.append_worker(Same)
    server.run()
