"""tritonclient[http], sync (gevent) and asyncio (aiohttp)."""

import asyncio
from importlib.metadata import version

import numpy as np
import tritonclient.http as http
import tritonclient.http.aio as aio
from calls import ADDRESS, call, raises, tell
from tritonclient.utils import InferenceServerException

client = http.InferenceServerClient(ADDRESS, concurrency=4)


def tensor(name, array, datatype=None, binary=True):
    from tritonclient.utils import np_to_triton_dtype

    given = http.InferInput(name, list(array.shape), datatype or np_to_triton_dtype(array.dtype))
    given.set_data_from_numpy(array, binary_data=binary)
    return given


@call
def is_server_live():
    assert client.is_server_live()


@call
def is_server_ready():
    assert client.is_server_ready()


@call
def is_model_ready():
    assert client.is_model_ready("scale") and client.is_model_ready("scale", "1")
    assert not client.is_model_ready("none")


@call
def get_server_metadata():
    assert client.get_server_metadata()["name"] == "carpool"


@call
def get_model_metadata():
    told = client.get_model_metadata("addsub")
    assert {each["name"] for each in told["inputs"]} == {"a", "b"}
    raises(InferenceServerException, lambda: client.get_model_metadata("none"))


@call
def get_model_config():
    assert client.get_model_config("scale")["max_batch_size"] == 64


@call
def get_model_repository_index():
    assert {each["name"] for each in client.get_model_repository_index()} >= {"scale", "addsub"}


@call
def load_and_unload_model_are_refused():
    raises(InferenceServerException, lambda: client.load_model("scale"))
    raises(InferenceServerException, lambda: client.unload_model("scale"))


@call
def get_inference_statistics():
    assert client.get_inference_statistics("scale")["model_stats"][0]["name"] == "scale"
    assert len(client.get_inference_statistics()["model_stats"]) >= 5


@call
def what_is_not_served_is_an_exception():
    for ask in (
        client.get_trace_settings,
        client.get_log_settings,
        client.get_system_shared_memory_status,
        client.get_cuda_shared_memory_status,
    ):
        raises(InferenceServerException, ask)


@call
def infer():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for binary_in in (True, False):
        for binary_out in (True, False):
            outputs = [http.InferRequestedOutput("output", binary_data=binary_out)]
            result = client.infer("scale", [tensor("input", array, binary=binary_in)], outputs=outputs, request_id="7")
            assert (result.as_numpy("output") == array * 2).all() and result.get_response()["id"] == "7"
    assert (client.infer("scale", [tensor("input", array)]).as_numpy("output") == array * 2).all()
    assert client.infer("scale", [tensor("input", array)], model_version="1", priority=1, timeout=10**7)


@call
def infer_with_several_inputs_and_outputs():
    a, b = np.arange(8, dtype=np.int32).reshape(2, 4), np.ones((2, 4), np.int32)
    result = client.infer("addsub", [tensor("a", a), tensor("b", b, binary=False)])
    assert (result.as_numpy("sum") == a + b).all() and (result.as_numpy("difference") == a - b).all()
    wanted = [http.InferRequestedOutput("difference")]
    only = client.infer("addsub", [tensor("a", a), tensor("b", b)], outputs=wanted)
    assert (only.as_numpy("difference") == a - b).all() and only.as_numpy("sum") is None


@call
def infer_all_dtypes():
    for dtype in ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]:
        array = np.array([[0, 1], [1, 0]]).astype(dtype)
        result = client.infer("echo", [tensor("input", array)])
        assert (result.as_numpy("output") == array).all(), dtype


@call
def infer_arrays_that_are_not_contiguous():
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    assert (client.infer("scale", [tensor("input", array)]).as_numpy("output") == array * 2).all()
    array = np.arange(12, dtype=np.float32).reshape(4, 3)[::2]
    assert (client.infer("scale", [tensor("input", array)]).as_numpy("output") == array * 2).all()


@call
def infer_without_rows():
    array = np.zeros((0, 3), np.float32)
    assert client.infer("scale", [tensor("input", array)]).as_numpy("output").shape[0] == 0


@call
def infer_texts_and_bytes():
    texts = np.array(["ab", "é"], dtype=np.object_)
    assert client.infer("texts", [tensor("x", texts)]).as_numpy("output").tolist() == [b"AB", "É".encode()]
    data = np.array([b"\xff\x00", b"ab"], dtype=np.object_)
    assert client.infer("binary", [tensor("x", data)]).as_numpy("output").tolist() == [b"\x00\xff", b"ba"]


@call
def infer_large_tensors():
    array = np.random.default_rng(0).random((1, 1_500_000), np.float32)
    assert (client.infer("scale", [tensor("input", array)]).as_numpy("output") == array * 2).all()


@call
def async_infer():
    array = np.ones((1, 3), np.float32)
    asked = [client.async_infer("scale", [tensor("input", array * n)]) for n in range(20)]
    assert [each.get_result().as_numpy("output")[0, 0] for each in asked] == [2.0 * n for n in range(20)]


@call
def errors_are_its_exceptions():
    array = np.ones((1, 3), np.float64)
    error = raises(InferenceServerException, lambda: client.infer("scale", [tensor("input", array)]))
    assert "FP64" in error.message() and error.status() == "400", error.status()
    raises(InferenceServerException, lambda: client.infer("none", [tensor("input", array)]))
    wrong = [http.InferRequestedOutput("nothing")]
    right = np.ones((1, 3), np.float32)
    raises(InferenceServerException, lambda: client.infer("scale", [tensor("input", right)], outputs=wrong))


@call
def asyncio_client():
    async def main():
        async with aio.InferenceServerClient(ADDRESS) as client:
            assert await client.is_server_live() and await client.is_server_ready()
            assert await client.is_model_ready("scale")
            assert (await client.get_server_metadata())["name"] == "carpool"
            assert (await client.get_model_metadata("scale"))["name"] == "scale"
            assert (await client.get_model_config("scale"))["name"] == "scale"
            assert await client.get_model_repository_index()
            assert await client.get_inference_statistics("scale")
            array = np.ones((2, 3), np.float32)

            async def one(n):
                given = aio.InferInput("input", [2, 3], "FP32")
                given.set_data_from_numpy(array * n)
                return (await client.infer("scale", [given])).as_numpy("output")[0, 0]

            assert await asyncio.gather(*[one(n) for n in range(20)]) == [2.0 * n for n in range(20)]

    asyncio.run(main())


client.close()
tell("tritonclient[http]", version("tritonclient"))
