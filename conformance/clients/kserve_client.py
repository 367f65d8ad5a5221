"""kserve: its inference clients of V1 and V2."""

import asyncio
from importlib.metadata import version

import numpy as np
from calls import URL, call, raises, tell
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig


def v2(**more):
    return InferenceRESTClient(RESTConfig(protocol="v2", **more))


def v1():
    return InferenceRESTClient(RESTConfig(protocol="v1"))


def request(array, binary):
    given = InferInput(name="input", shape=list(array.shape), datatype="FP32")
    given.set_data_from_numpy(array, binary_data=binary)
    return InferRequest(model_name="scale", infer_inputs=[given])


@call
def v2_infer():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for binary in (False, True):
        told = asyncio.run(v2().infer(URL, request(array, binary), model_name="scale"))
        assert told.model_name == "scale"
        assert (told.outputs[0].as_numpy() == array * 2).all()


@call
def v2_is_server_live():
    assert asyncio.run(v2().is_server_live(URL))


@call
def v2_is_server_ready():
    assert asyncio.run(v2().is_server_ready(URL))


@call
def v2_is_model_ready():
    assert asyncio.run(v2().is_model_ready(URL, "scale"))


@call
def v2_errors():
    asked = request(np.ones((1, 1), np.float32), False)
    error = raises(Exception, lambda: asyncio.run(v2(retries=0).infer(URL, asked, model_name="none")))
    assert "404" in str(error), error


@call
def v1_infer():
    told = asyncio.run(v1().infer(URL, {"instances": ["a", "b"]}, model_name="texts"))
    assert told == {"predictions": ["A", "B"]}


@call
def v1_is_model_ready():
    assert asyncio.run(v1().is_model_ready(URL, "texts"))


tell("kserve", version("kserve"))
