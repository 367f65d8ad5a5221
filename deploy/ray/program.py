"""What the files of this folder run: the digits of the examples, as an application of Ray Serve.

serve run program:app
"""

import carpool
from examples.digits import Digits

service = carpool.Service(
    carpool.Stage(Digits, max_batch_size=64, workers=4, needs={"num_cpus": 1}),
    name="digits",
    slo_s=0.1,
)

app = carpool.ray.app("program:service", replicas=2)
