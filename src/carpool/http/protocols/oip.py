"""The Open Inference Protocol V2 over REST, with binary tensors: what clients of Triton, KServe and
MLServer speak.

The first axis of each tensor is the rows. Each row is an item with a place of its own in the queue,
so it shares batches with rows of other callers.

Its statistics extension is answered from the numbers that carpool counts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from typing import Any, Final

import msgspec

from carpool.engine.allowance import Allowance
from carpool.engine.observe.snapshot import ServiceSnapshot, StageSnapshot
from carpool.engine.wire.payload import ARRAYS, LARGE, OBJECT, Memory
from carpool.errors import InvalidRequest
from carpool.http.exchange import HttpResponse
from carpool.http.protocols.base import (
    HttpProtocol,
    ModelOfApp,
    ProtocolRequest,
    ProtocolRoute,
    ShownError,
    Submission,
    unfit,
)
from carpool.http.protocols.rows import INPUT, OUTPUT, TensorColumn, TensorTable, items_of, table_of, tensors_of
from carpool.http.protocols.tensors import Tensor, elements_of, from_binary, from_json, to_binary
from carpool.http.protocols.wording import as_response, as_written, read, versions_of, without_details
from carpool.service.checks import LARGEST_PRIORITY
from carpool.version import __version__

VERSION: Final = "1"
HEADER_LENGTH: Final = b"inference-header-content-length"
_BINARY: Final = b"application/octet-stream"
_CONTENT_TYPES: Final = ("application/json", "application/octet-stream")
_MOST_INPUTS = 1024
_PLATFORM = "python"


class _Tensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: Any = None


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | None = None


class _Infer(msgspec.Struct):
    inputs: list[_Tensor]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[_Output] | None = None


class _Index(msgspec.Struct):
    ready: bool | None = False


_read_infer = msgspec.json.Decoder(_Infer).decode
_read_index = msgspec.json.Decoder(_Index).decode
_encode = msgspec.json.Encoder().encode


class OpenInference(HttpProtocol):
    """The Open Inference Protocol V2 over REST."""

    name = "oip"
    prefixes = ("/v2",)
    headers = ("inference-header-content-length",)

    def routes(self, models: Sequence[ModelOfApp]) -> Iterator[ProtocolRoute]:
        names = [model.name for model in models]
        for path, answer, summary in (
            ("/v2/health/live", lambda request: as_response({"live": True}), "Liveness"),
            ("/v2/health/ready", _server_ready, "Readiness of the server"),
            ("/v2", lambda request: as_response(_server_metadata()), "The server and its extensions"),
            ("/v2/models", lambda request: as_response({"models": names}), "The models"),
            ("/v2/models/stats", lambda request: as_response(_statistics_of(models)), "Statistics of all models"),
        ):
            yield ProtocolRoute("GET", path, answer, summary=summary)
        yield ProtocolRoute("POST", "/v2/repository/index", partial(_index, models), summary="The state of all models")
        for model in models:
            served = _ServedTables(model)
            for i, name in enumerate(versions_of(model.name)):
                for action in ("load", "unload"):
                    path = f"/v2/repository/models/{name}/{action}"
                    yield ProtocolRoute("POST", path, _refuse_control, model, is_alias=True)
                yield from served.routes(f"/v2/models/{name}", is_alias=i > 0)
                yield from served.routes(f"/v2/models/{name}/versions/{VERSION}", is_alias=True)

    def error(self, error: ShownError) -> HttpResponse:
        return without_details(error)


def _server_ready(request: ProtocolRequest) -> HttpResponse:
    if request.problem is not None:
        return as_response({"ready": False, "live": True, "error": request.problem}, status=503)
    return as_response({"ready": True, "live": True})


def _server_metadata() -> dict[str, Any]:
    extensions = ["binary_tensor_data", "statistics", "model_configuration", "parameters", "schedule_policy"]
    return {"name": "carpool", "version": __version__, "extensions": extensions}


def _index(models: Sequence[ModelOfApp], request: ProtocolRequest) -> HttpResponse:
    wanted = read(_read_index, request.body or b"{}")
    entries = []
    for model in models:
        problem = model.problem
        if problem is None or not wanted.ready:
            state = "READY" if problem is None else "UNAVAILABLE"
            entries.append({"name": model.name, "version": VERSION, "state": state, "reason": problem or ""})
    return as_response(entries)


def _refuse_control(request: ProtocolRequest) -> HttpResponse:
    raise InvalidRequest("models are loaded and unloaded by who runs the server, not by its clients")


class _ServedTables:
    """The routes of one model."""

    def __init__(self, model: ModelOfApp) -> None:
        self._model = model
        self._memory = Memory()
        self._inputs: TensorTable | None = None
        self._outputs: TensorTable | None = None
        self._misfit = ""
        self._has_looked = False

    def _look(self) -> None:
        """Find out which tensors the model takes; at the first request, since it needs numpy."""
        model = self._model
        self._has_looked = True
        if importlib.util.find_spec("numpy") is None:
            self._misfit = "the server has no numpy, which tensors need: pip install numpy"
            return
        try:
            takes = model.takes
            self._inputs = table_of(takes.input_type, INPUT, takes.examples, is_whole=takes.takes_array)
        except ValueError as error:
            self._misfit = f"the model {model.name} does not take tensors: {error}. Ask it at /predict"
        try:
            gives = model.gives
            whole = gives.rows_type
            self._outputs = table_of(whole or gives.output_type, OUTPUT, is_whole=whole is not None)
        except ValueError:
            self._outputs = None  # what the results are shows when they are there

    def routes(self, path: str, *, is_alias: bool) -> Iterator[ProtocolRoute]:
        model, what = self._model, f"of {self._model.name}"
        of_model = partial(ProtocolRoute, model=model, is_alias=is_alias)
        yield of_model("GET", path, self.metadata, summary=f"Tensors {what}", fits=self.fits)
        yield of_model("GET", f"{path}/ready", self.ready, summary=f"Readiness {what}")
        yield of_model("GET", f"{path}/config", self.config, summary=f"Configuration {what}", fits=self.fits)
        yield of_model("GET", f"{path}/stats", self.stats, summary=f"Statistics {what}")
        yield of_model(
            "POST",
            f"{path}/infer",
            self.infer,
            summary=f"Ask {model.name} with tensors",
            reads=_CONTENT_TYPES,
            writes=_CONTENT_TYPES,
            fits=self.fits,
        )

    def fits(self) -> bool:
        """Report whether tensors make items of the model, and its results make tensors."""
        if not self._has_looked:
            self._look()
        return self._inputs is not None and self._model.formats.holds(OBJECT, ARRAYS)

    def ready(self, request: ProtocolRequest) -> HttpResponse:
        problem = request.problem or self._model.problem
        if problem is not None:
            return as_response({"name": self._model.name, "ready": False, "error": problem}, status=503)
        return as_response({"name": self._model.name, "ready": True})

    def stats(self, request: ProtocolRequest) -> HttpResponse:
        return as_response(_statistics_of([self._model]))

    def metadata(self, request: ProtocolRequest) -> HttpResponse:
        inputs, outputs = self._tables()
        return as_response(
            {
                "name": self._model.name,
                "versions": [VERSION],
                "platform": _PLATFORM,
                "inputs": [_described(column) for column in inputs.columns],
                "outputs": [_described(column) for column in _known(outputs)],
            }
        )

    def config(self, request: ProtocolRequest) -> HttpResponse:
        """Answer with the same, and with the largest batch, as Triton does."""
        inputs, outputs = self._tables()
        most = self._model.service.stages[0].max_batch_size
        return as_response(
            {
                "name": self._model.name,
                "platform": _PLATFORM,
                "backend": "carpool",
                "version_policy": {"latest": {"num_versions": 1}},
                "max_batch_size": most or 0,
                "input": [_configured(column) for column in inputs.columns],
                "output": [_configured(column) for column in _known(outputs)],
                **({"dynamic_batching": {}} if most else {}),
            }
        )

    def infer(self, request: ProtocolRequest) -> Submission:
        self._model.formats.of_made(OBJECT, ARRAYS)  # raises
        inputs, _ = self._tables()
        asked, binary = _parts_of(request, inputs)
        outputs = asked.outputs or ()
        if len({output.name for output in outputs}) != len(outputs):
            raise InvalidRequest("an output is asked for twice: name each one once")
        tensors = _tensors_of(asked, binary, self._model.allowance(len(request.body)))
        items = items_of(inputs, tensors)
        return Submission(
            self._model,
            items.values,
            partial(self._respond, asked),
            sent_as=items.sent_as,
            wanted_as=ARRAYS,
            timeout_s=_timeout_s(_given(asked.parameters)),
            priority=_priority(_given(asked.parameters)),
        )

    def _tables(self) -> tuple[TensorTable, TensorTable | None]:
        if not self.fits() or self._inputs is None:
            raise unfit(self._misfit or f"tensors would go past the decode or encode of {self._model.name}")
        return self._inputs, self._outputs

    def _respond(self, asked: _Infer, results: list[Any]) -> HttpResponse:
        tensors = {tensor.name: tensor for tensor in tensors_of(self._outputs, results)}
        for output in asked.outputs or ():
            if output.name not in tensors:
                known = ", ".join(map(repr, tensors))
                raise InvalidRequest(f"the model has no output {output.name!r}: its outputs are {known}")
        wanted = asked.outputs or [_Output(name) for name in tensors]
        return _written(self._model.name, asked, [(tensors[output.name], output) for output in wanted], self._memory)


def _known(outputs: TensorTable | None) -> list[TensorColumn]:
    """Return the outputs whose datatypes are known by the hint, so that each answer has these."""
    return [] if outputs is None else [column for column in outputs.columns if column.datatypes is not None]


def _described(column: TensorColumn) -> dict[str, Any]:
    return {"name": column.name, "datatype": column.datatype, "shape": [-1, *column.shape]}


def _configured(column: TensorColumn) -> dict[str, Any]:
    kind = "STRING" if column.datatype == "BYTES" else column.datatype
    return {"name": column.name, "data_type": f"TYPE_{kind}", "dims": list(column.shape) or [1]}


def _parts_of(request: ProtocolRequest, inputs: TensorTable) -> tuple[_Infer, memoryview]:
    body = request.body if isinstance(request.body, bytearray) else bytearray(request.body)  # rows may be written to
    given = request.headers.get(HEADER_LENGTH)
    if given is None:
        return read(_read_infer, body), memoryview(b"")
    if not given.isdigit() or len(given) > 12 or int(given) > len(body):
        raise InvalidRequest(
            f"Inference-Header-Content-Length must be the length of the JSON in the body, which has {len(body)} bytes"
        )
    length = int(given)
    if not length:
        return _raw(inputs, len(body)), memoryview(body)
    return read(_read_infer, body[:length]), memoryview(body)[length:]


def _raw(inputs: TensorTable, nbytes: int) -> _Infer:
    """Return the submission of a request that is nothing but one tensor of one row."""
    if inputs.is_record and len(inputs.columns) > 1:
        raise InvalidRequest("a body without JSON is one tensor, and the model has several inputs")
    (column,) = inputs.columns
    import numpy as np

    from carpool.http.protocols.tensors import DTYPES

    if column.datatype == "BYTES":
        shape = [1]
    else:
        size = np.dtype(DTYPES[column.datatype]).itemsize
        if len(column.shape) > 1:
            raise InvalidRequest(
                "a body without JSON is a flat tensor, and the shape of the model's input is not known"
            )
        shape = [1, nbytes // size] if column.shape else [nbytes // size]
    tensor = _Tensor(column.name, shape, column.datatype, {"binary_data_size": nbytes})
    return _Infer([tensor], parameters={"binary_data_output": True})


def _tensors_of(asked: _Infer, binary: memoryview, allowance: Allowance) -> list[Tensor]:
    if not 0 < len(asked.inputs) <= _MOST_INPUTS:
        raise InvalidRequest(f"a request has 1 to {_MOST_INPUTS} inputs, not {len(asked.inputs)}")
    tensors: list[Tensor] = []
    at = 0
    for each in asked.inputs:
        size = _given(each.parameters).get("binary_data_size")
        if size is None:
            tensors.append(from_json(each.name, each.datatype, each.shape, each.data, allowance))
            continue
        if each.data is not None or type(size) is not int or not 0 <= size <= len(binary) - at:
            raise InvalidRequest(
                f"input {each.name!r} has binary_data_size {size!r:.40}: it must be a number of bytes that follow the"
                f" JSON, of which {len(binary) - at} are left, and the input has no data besides"
            )
        data = binary[at : at + size]
        tensors.append(from_binary(each.name, each.datatype, each.shape, data, allowance))
        at += size
    if at != len(binary):
        raise InvalidRequest(f"{len(binary) - at} bytes follow the JSON that belong to no input")
    return tensors


def _given(parameters: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (parameters or {}).items() if value is not None}


def _timeout_s(parameters: dict[str, Any]) -> float:
    """Return the time-out of a request, which is in microseconds. Raises `InvalidRequest`."""
    timeout = parameters.get("timeout", 0)
    if type(timeout) is not int or not 0 <= timeout < 2**63:
        raise InvalidRequest(f"the parameter timeout must be a whole number of microseconds, not {timeout!r:.40}")
    return timeout / 1e6 or inf


def _priority(parameters: dict[str, Any]) -> int | None:
    """Return the priority of a request, of which Triton's highest is 1. Raises `InvalidRequest`."""
    priority = parameters.get("priority", 0)
    if type(priority) is not int or priority < 0:
        raise InvalidRequest(f"the parameter priority must be a whole number from 0, not {priority!r:.40}")
    return max(LARGEST_PRIORITY - (priority - 1), -LARGEST_PRIORITY) if priority else None


def _written(model: str, asked: _Infer, outputs: list[tuple[Tensor, _Output]], memory: Memory) -> HttpResponse:
    all_binary = _given(asked.parameters).get("binary_data_output") is True
    described: list[dict[str, Any]] = []
    binary: list[bytes | memoryview] = []
    for tensor, wish in outputs:
        entry: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
        }
        parameters = _given(wish.parameters)
        if parameters.get("classification"):
            raise InvalidRequest(f"output {tensor.name!r} is asked for as a classification, which is not supported")
        if parameters.get("binary_data", all_binary) is True:
            data = to_binary(tensor)
            entry["parameters"] = {"binary_data_size": sum(map(len, data))}
            binary += data
        else:
            entry["data"] = as_written(elements_of(tensor))
        described.append(entry)
    answer: dict[str, Any] = {"model_name": model, "model_version": VERSION}
    if asked.id:
        answer["id"] = asked.id
    answer["outputs"] = described
    head = _encode(answer)
    if not binary:
        return HttpResponse(200, head)
    headers = ((b"inference-header-content-length", str(len(head)).encode()),)
    return HttpResponse(200, _joined([head, *binary], memory), _BINARY, headers)


def _joined(pieces: list[bytes | memoryview], memory: Memory) -> bytes | bytearray:
    """Return pieces one after the other: large ones in memory that was used before, as fresh memory
    costs more than what is written to it.
    """
    size = sum(map(len, pieces))
    if size < LARGE:
        return b"".join(pieces)
    body = memory.buffer(size)
    view, at = memoryview(body), 0
    for piece in pieces:
        view[at : at + len(piece)] = piece
        at += len(piece)
    return body


_NS = 1e9


def _statistics_of(models: Sequence[ModelOfApp]) -> dict[str, Any]:
    found = [(model.name, model.snapshot()) for model in models]
    return {"model_stats": [_statistics_of_one(name, snapshot) for name, snapshot in found if snapshot is not None]}


def _statistics_of_one(name: str, snapshot: ServiceSnapshot) -> dict[str, Any]:
    ok = snapshot.outcomes.get("ok", 0)
    failed = sum(n for outcome, n in snapshot.outcomes.items() if outcome != "ok")
    queue_s = sum(stage.mean_queue_s for stage in snapshot.stages)
    compute_s = sum(stage.mean_compute_s for stage in snapshot.stages)
    last = snapshot.stages[-1]
    return {
        "name": name,
        "version": "1",
        "last_inference": 0,
        "inference_count": ok,
        "execution_count": sum(stage.batches for stage in snapshot.stages),
        "inference_stats": {
            "success": _times(ok, snapshot.mean_latency_s),
            "fail": _times(failed, 0.0),
            "queue": _times(ok, queue_s),
            "compute_input": _times(ok, 0.0),
            "compute_infer": _times(ok, compute_s),
            "compute_output": _times(ok, 0.0),
            "cache_hit": _times(0, 0.0),
            "cache_miss": _times(0, 0.0),
        },
        "response_stats": {},
        "batch_stats": _batches(last),
        "memory_usage": [],
    }


def _batches(stage: StageSnapshot) -> list[dict[str, Any]]:
    """Return how often each batch size was run, with the mean time of all."""
    return [
        {
            "batch_size": size,
            "compute_input": _times(n, 0.0),
            "compute_infer": _times(n, stage.mean_compute_s),
            "compute_output": _times(n, 0.0),
        }
        for size, n in stage.batch_sizes.items()
    ]


def _times(count: int, mean_s: float) -> dict[str, int]:
    return {"count": count, "ns": int(count * mean_s * _NS)}
