"""The `Model` that users write, and its traits: which hooks it has, and the types of its items.

Any callable can be a model. The class adds `setup`, hooks for each item, formats of the user's own
and `examples`.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from carpool.engine.foreign import text_of
from carpool.engine.forms import (
    STEPS_HOOKS,
    Form,
    check_has_steps,
    check_is_one_form,
    collected_type,
    part_type,
    yielded_type,
    yields,
)
from carpool.engine.http_request import HTTPRequest
from carpool.engine.http_response import Response
from carpool.engine.logger import logger
from carpool.engine.rows import is_array_type
from carpool.engine.turns import split_hint
from carpool.engine.type_hints import hints_of, is_called_as_hinted, is_list, is_never_a_list, is_union, signature_of

_HOOKS = ("setup", "preprocess", "predict", "postprocess", "teardown", "decode", "encode")
_MOST_PRODUCED = 32
_UNRESOLVED = (NameError, AttributeError, TypeError)  # what a hint raises that means nothing where it stands
_CONTENT_TYPE = re.compile(r"[!-.0-~]+/[!-.0-~][ -~]*")

AnyModel = type | Callable[..., Any]
"""A `Model` subclass, any class with `predict`, a function, or a `functools.partial`."""

Adapter = Callable[[Any], Any]
"""Makes an item of what is sent to an address of its own (`Service(routes=...)`)."""


class Model:
    """Base class of models. Write plain, synchronous, single-process code.

    A stage makes one instance in each worker. A subclass defines `predict`, which returns the
    answer or yields parts of it, or `start`, `step` and `stop`
    ("Answers in parts" in the docs). If it needs them, it has besides:

    * `__init__(self, ...)`: a stage's `kwargs` go there.
    * `setup(self)`: runs once in each worker, before it is ready. Load weights here.
    * `preprocess(self, x)`: runs for each item before `predict`, in the worker.
    * `postprocess(self, y)` or `postprocess(self, y, x)`: runs for each result after `predict`; `x`
      is what `predict` got.
    * `teardown(self)`: runs when the worker stops in an orderly way.
    * `decode(self, bodies: list[bytes]) -> list` with `accepts = ("text/csv",)`: reads the bodies
      of a whole batch in a format of your own. A `decode(self, requests:
      list[carpool.HTTPRequest])` gets headers, query and path as well.
    * `encode(self, results: list) -> list[bytes]` with `produces = "text/csv"`: writes the results
      of a whole batch in a format of your own.

    The type hints of `preprocess` (or `predict`, without one) say what an item over HTTP must look
    like, those of `postprocess` (or `predict`) what a result looks like. Without hints, anything
    that JSON can express is accepted.
    """

    examples: ClassVar[Sequence[Any]] = ()
    """Items for warm-up, health check and OpenAPI, as `preprocess` (else `predict`) takes them."""

    accepts: ClassVar[Sequence[str]] = ()
    """The content types that `decode` reads; with JSON or msgpack among them, it reads all."""

    produces: ClassVar[str | Sequence[str] | None] = None
    """The content type that `encode` writes, or several; `encode` then gets one as an argument.

    With JSON or msgpack among them, no answer is written without it.
    """

    def setup(self) -> Awaitable[None] | None:
        """Prepare for `predict`: load weights, for example. Runs once in each worker."""

    def predict(self, x: Any, /) -> Any:
        """Return the result for one item, or for a list of items a sequence of as many results.

        Args:
            x: One item; in a stage with `max_batch_size`, a list of items. If the type hint is a
                numpy array (`xs: NDArray[np.float32]`), it is one array of shape (items, ...).

        Returns:
            One result; in a stage with `max_batch_size`, a list, tuple, numpy array or tensor with
            as many results as there are items, in their order.
        """
        raise NotImplementedError(f"{type(self).__name__} has no predict method")

    def teardown(self) -> Awaitable[None] | None:
        """Release what `setup` has acquired."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a model takes and returns, as its class or signature says.

    Attributes:
        input_type: The type of one item as it comes in; `Any` without a hint.
        output_type: The type of one result as it goes out; `Any` without a hint.
        postprocess_takes_x: Whether `postprocess` takes the item as well as the result.
        accepts: The content types that `decode` reads.
        produces: The content types that `encode` writes; a client without a preference gets the
            first one.
        decodes_requests: Whether `decode` takes requests instead of their bodies.
        encode_takes_type: Whether `encode` takes the content type to write.
        takes_array: Whether `predict` takes one array instead of a list of items.
        rows_type: The type of the array whose rows are the results; None if they are given in
            another way.
        form: How the model gives its answers.
        part_type: The type of one part of an answer; `Any` without a hint. `output_type` is that of
            the whole answer.
        can_resume: Whether `resume` can go on with an answer of which some parts are there.
        early_types: The types of the early answers (`Done`) that it returns by its hint.
        names_branches: Whether it returns `To` by its hint.
        is_joined: Whether it is no model, but what several branches or items come to.
    """

    name: str
    input_type: Any
    output_type: Any
    postprocess_takes_x: bool
    accepts: tuple[str, ...]
    produces: tuple[str, ...]
    examples: tuple[Any, ...]
    decodes_requests: bool
    encode_takes_type: bool
    takes_array: bool = False
    rows_type: Any = None
    form: Form = Form.WHOLE
    part_type: Any = Any
    can_resume: bool = False
    collects: bool = False
    early_types: tuple[Any, ...] = ()
    names_branches: bool = False
    is_joined: bool = False

    @property
    def in_parts(self) -> bool:
        """Whether the model gives its answers in parts."""
        return self.form is not Form.WHOLE


def name_of(model: AnyModel) -> str:
    """Return the name of a class or function, or of what a partial wraps."""
    while isinstance(model, functools.partial):
        model = model.func
    name = getattr(model, "__name__", None)
    return name if isinstance(name, str) else type(model).__name__


def traits_of(model: AnyModel, batched: bool) -> Traits:
    """Read a model's traits from its class or signature.

    Args:
        model: See `AnyModel`.
        batched: Whether `predict` takes a list of items.

    Raises:
        TypeError: It is not a model, or cannot be served; the text says what to change.
    """
    owner, predict = _owner_and_predict(model)
    name = name_of(model)
    form = _form_of(owner, predict, batched)
    batched = batched or form is Form.STEPS
    postprocess = getattr(owner, "postprocess", None)
    takes, returns = types_of(predict)
    if form is Form.STEPS:
        returns = types_of(owner.step)[1]
    elif form is not Form.WHOLE:
        returns = yielded_type(returns)
    takes_array = batched and is_array_type(takes)
    if takes_array and form is not Form.WHOLE:
        raise TypeError(
            f"{_taker(owner, name)} takes an array by its hint, but it gets a list of items: stack them in it"
        )
    rows_type = None
    if batched:
        rows_type = returns if is_array_type(returns) and not hasattr(owner, "postprocess") else None
        takes, returns = _item_type(takes), Any if is_array_type(returns) else _item_type(returns)
    takes = _type_before_hook(owner, name, takes, batched)
    returns = _type_after_hook(owner, name, returns, batched)
    part = Any if form is Form.WHOLE else part_type(returns)
    if form is not Form.WHOLE:
        collect = getattr(owner, "collect", None)
        returns = collected_type(part) if collect is None else types_of(collect)[1]
    returns, early, names = split_hint(returns)
    accepts, produces = _content_types(owner, name)
    return Traits(
        name=name,
        input_type=takes,
        output_type=_without_response(returns),
        early_types=early,
        names_branches=names,
        postprocess_takes_x=postprocess is not None and len(_parameters(postprocess)) > 1,
        accepts=accepts,
        produces=produces,
        examples=_examples(getattr(owner, "examples", ()), name),
        decodes_requests=bool(accepts) and _takes_requests(owner.decode, name),
        encode_takes_type=bool(produces) and _takes_two(owner.encode),
        takes_array=takes_array,
        rows_type=rows_type,
        form=form,
        part_type=part,
        can_resume=form is Form.STEPS and hasattr(owner, "resume"),
        collects=form is not Form.WHOLE and hasattr(owner, "collect"),
    )


def _form_of(owner: Any, predict: Callable[..., Any], batched: bool) -> Form:
    if _is_of_steps(owner):
        return Form.STEPS
    if not yields(predict):
        return Form.WHOLE
    return Form.BATCH_GENERATOR if batched else Form.GENERATOR


def _is_of_steps(owner: Any) -> bool:
    """Report whether a class has no `predict` but methods of a model of steps; False for None."""
    return owner is not None and getattr(owner, "predict", Model.predict) is Model.predict


def check_takes_a_list(model: AnyModel, because: str) -> None:
    """Whether the hint of `predict` can mean a list of items, as which it gets them.

    Raises:
        TypeError: It cannot; the text has the hint that was probably meant.
    """
    owner, predict = _owner_and_predict(model)
    takes, _ = _types_if_known(predict)
    if is_never_a_list(takes) and is_called_as_hinted(_implementation(predict)):
        what, kind = _taker(owner, name_of(model)), _shown(takes)
        raise TypeError(f"{what} takes {kind}, but {because} it gets a list: did you mean list[{kind}]?")


def doubt_about_an_item(model: AnyModel) -> str | None:
    """Return a question for the user whose `predict` takes a list and gets single items, if any.

    None where the model shows that an item is a list.
    """
    owner, predict = _owner_and_predict(model)
    takes, gives = _types_if_known(predict)
    if typing.get_origin(takes) is not list or not (gives is Any or is_list(gives) or is_array_type(gives)):
        return None
    if not is_called_as_hinted(_implementation(predict)) or getattr(owner, "accepts", None):
        return None
    preprocess = getattr(owner, "preprocess", None)
    if preprocess is not None:
        raw, given = _types_if_known(preprocess)
        if given is Any or is_list(given) or is_array_type(given) or is_list(raw):
            return None
    elif any(
        not isinstance(example, str | bytes) and hasattr(type(example), "__len__")
        for example in getattr(owner, "examples", ())
    ):
        return None
    what, kind = _taker(owner, name_of(model)), _shown(takes)
    return (
        f"{what} takes {kind}, but without max_batch_size it gets one item at a time: give the stage a max_batch_size"
        f" if that is a list of items. If one item is such a list, show it in `examples`, or hint it as"
        f" {kind.replace('list', 'Sequence', 1)}"
    )


def check_kwargs(model: AnyModel, kwargs: Mapping[str, Any]) -> None:
    """Check that a class can be made, or a function called with an item, with these arguments.

    Raises:
        TypeError: It cannot; the text names the arguments.
    """
    try:
        signature = signature_of(model)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(*(() if isinstance(model, type) else (None,)), **kwargs)
    except TypeError as error:
        taker = f"{name_of(model)}.__init__" if isinstance(model, type) else f"{name_of(model)}, called with an item"
        given = ", ".join(map(repr, kwargs)) or "nothing"
        raise TypeError(f"kwargs does not fit {taker}: {error}; kwargs gives {given}") from None


def _type_before_hook(owner: Any, name: str, takes: Any, batched: bool) -> Any:
    """Return what `preprocess` (else `predict`) takes, by the hints. Raises TypeError."""
    preprocess = getattr(owner, "preprocess", None)
    if preprocess is None:
        return takes
    raw, given = types_of(preprocess)
    if batched and (_is_batch_of(raw, takes) if given is Any else _is_batch_of(given, takes) and is_list(raw)):
        way_out = f" If an item comes as a list, say what it becomes: write `-> {_shown(takes)}` after its parameters."
        raise _takes_a_batch(f"preprocess of {name}", raw, f"predict takes {_shown(takes)}", way_out)
    return raw


def _type_after_hook(owner: Any, name: str, returns: Any, batched: bool) -> Any:
    """Return what `postprocess` (else `predict`) returns, by the hints. Raises TypeError."""
    postprocess = getattr(owner, "postprocess", None)
    if postprocess is None:
        return returns
    result, given = types_of(postprocess)
    if batched and _is_batch_of(result, returns):
        raise _takes_a_batch(f"postprocess of {name}", result, f"predict returns {_shown(returns)}")
    return given


def _owner_and_predict(model: AnyModel) -> tuple[Any, Callable[..., Any]]:
    """Return what has the hooks (None for a function), and what takes the items: `predict`, or
    `start` of a model of steps. Raises TypeError.
    """
    if isinstance(model, functools.partial):
        _check_partial(model)
    if isinstance(model, type):
        name = model.__name__
        hooks: tuple[str, ...] = _HOOKS
        if _is_of_steps(model):
            check_has_steps(model, name)
            hooks = (*(hook for hook in _HOOKS if hook != "predict"), *STEPS_HOOKS)
            takes_items = model.start  # type: ignore[attr-defined]
        else:
            check_is_one_form(model, name)
            takes_items = model.predict  # type: ignore[attr-defined]
        for hook in hooks:
            method = getattr(model, hook, None)
            if method is not None:
                _check_method(method, f"{hook} of {name}", may_yield=hook == "predict")
        return model, takes_items
    if callable(model):
        _check_method(model, name_of(model), may_yield=True)
        return None, model
    raise _not_a_model(model)


def is_model_object(given: object) -> bool:
    """Report whether an object is a model by itself: of a `Model`, or of any class with `predict`.

    A callable object is a function, unless it is a `Model`.
    """
    return isinstance(given, Model) or (hasattr(type(given), "predict") and not callable(given))


def _not_a_model(given: object) -> TypeError:
    if hasattr(given, "predict"):
        name = type(given).__name__
        return TypeError(
            f"give the class {name}, not an object of it, since each worker makes its own"
            " (what a stage's kwargs= names goes to its constructor)"
        )
    return TypeError(f"a model is a class with predict or a callable, not {given!r}")


def _taker(owner: Any, name: str) -> str:
    if owner is None:
        return name
    return f"{'start' if _is_of_steps(owner) else 'predict'} of {name}"


def _check_partial(model: functools.partial[Any]) -> None:
    """Refuse a partial of a model class: it would make a model of each item. Raises TypeError."""
    wrapped: Any = model
    while isinstance(wrapped, functools.partial):
        wrapped = wrapped.func
    if isinstance(wrapped, type) and hasattr(wrapped, "predict"):
        name, given = wrapped.__name__, ", ".join(f"{key!r}: ..." for key in model.keywords)
        raise TypeError(
            f"a functools.partial of the model class {name} cannot be served: give a stage the class itself, as"
            f" Stage({name}, kwargs={{{given}}}), or carpool.batch an instance"
        )


def _check_method(method: Any, name: str, *, may_yield: bool) -> None:
    if not callable(method):
        raise TypeError(f"{name} must be a method, not {method!r}")
    if not may_yield and yields(method):
        raise TypeError(
            f"{name} is a generator (it has a `yield`), and only predict may be one: collect what it yields in a list"
            " and `return` that"
        )


def _content_types(owner: Any, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the content types that a model reads, and those that it writes. Raises TypeError."""
    accepts, produces = getattr(owner, "accepts", ()), getattr(owner, "produces", None)
    if isinstance(accepts, str):
        accepts = (accepts,)
    if not isinstance(accepts, Collection) or not all(_is_content_type(each) for each in accepts):
        raise TypeError(f"accepts of {name} must be content types, such as ('text/csv',), not {accepts!r}")
    if produces is None or isinstance(produces, str):
        produces = () if produces is None else (produces,)
    if not isinstance(produces, Sequence) or not all(_is_content_type(each) for each in produces):
        raise TypeError(f"produces of {name} must be a content type, such as 'text/csv', not {produces!r}")
    if len(produces) > _MOST_PRODUCED:
        raise TypeError(
            f"produces of {name} names {len(produces)} content types: at most {_MOST_PRODUCED} are possible"
        )
    for setting, hook in ((accepts, "decode"), (produces, "encode")):
        if setting and not hasattr(owner, hook):
            raise TypeError(f"{name} names content types of its own but has no {hook} method")
    if len(produces) > 1 and not _takes_two(owner.encode):
        raise TypeError(
            f"{name} produces several content types, so its encode must take the one to write as an argument:"
            " encode(self, results, content_type)"
        )
    return tuple(accepts), tuple(produces)


def _takes_requests(decode: Callable[..., Any], name: str) -> bool:
    parameters = _parameters(decode)
    if not parameters or HTTPRequest.__name__ not in str(parameters[0].annotation):
        return False
    takes, _ = types_of(decode)
    if takes is HTTPRequest:
        raise TypeError(f"decode of {name} gets all requests of a batch: hint it as list[carpool.HTTPRequest]")
    return takes is Any or _item_type(takes) is HTTPRequest


def _takes_two(encode: Callable[..., Any]) -> bool:
    return len([each for each in _parameters(encode) if each.default is inspect.Parameter.empty]) > 1


def _is_content_type(value: Any) -> bool:
    return isinstance(value, str) and _CONTENT_TYPE.fullmatch(value) is not None


def _examples(examples: Any, name: str) -> tuple[Any, ...]:
    """Return a model's examples, which every worker reads anew. Raises TypeError."""
    if isinstance(examples, str | bytes | Mapping) or not (
        hasattr(examples, "__len__") and hasattr(examples, "__iter__")
    ):
        kind = type(examples).__name__
        raise TypeError(f"examples of {name} must be a list or tuple of inputs, not {kind}: write examples = (x, ...)")
    try:
        return tuple(examples)
    except Exception as error:
        raise TypeError(f"examples of {name} cannot be read: {type(error).__name__}: {text_of(error)}") from error


def _implementation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function whose hints are read: of a partial its own, of an object `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the positional parameters that callers fill, not `self` or those of a partial."""
    filled = len(function.args) if isinstance(function, functools.partial) else 0  # a partial of a partial is one
    function = _implementation(function)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = list(signature_of(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    return [p for p in parameters if p.kind in positional and p.name not in ("self", "cls")][filled:]


def types_of(function: Callable[..., Any]) -> tuple[Any, Any]:
    """Return the types of the first parameter and of the result, `Any` where there is no hint."""
    try:
        return _resolved_types(function)
    except _UNRESOLVED as error:
        logger.warning("types of %s cannot be resolved (%s): items are not checked", name_of(function), error)
        return Any, Any


def _types_if_known(function: Callable[..., Any]) -> tuple[Any, Any]:
    """Return what `types_of` does, without a line in the log: it has been written before."""
    try:
        return _resolved_types(function)
    except _UNRESOLVED:
        return Any, Any


def _resolved_types(function: Callable[..., Any]) -> tuple[Any, Any]:
    hints = hints_of(_implementation(function))
    parameters = _parameters(function)
    takes = hints.get(parameters[0].name, Any) if parameters else Any
    return takes, hints.get("return", Any)


def item_types_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return, by the names of parameters that are hinted as lists, the types of their items."""
    try:
        hints = hints_of(_implementation(function))
    except _UNRESOLVED:
        return {}
    return {name: _item_type(hint) for name, hint in hints.items()}


def _without_response(returns: Any) -> Any:
    """Return the type of results without `Response`; of a response, the content is checked.

    An exception in the place of a result is never written, so its type is left out as well.
    """
    if _is_no_value(returns):
        return Any
    kinds = typing.get_args(returns)
    if not is_union(returns) or not any(map(_is_no_value, kinds)):
        return returns
    return typing.Union[tuple(kind for kind in kinds if not _is_no_value(kind)) or (Any,)]  # noqa: UP007


def _is_no_value(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Response | BaseException)


def _item_type(batch_type: Any) -> Any:
    """Return the type of one item of `list[A]` and the like; `Any` if the hint does not say.

    The rows of an array are arrays of the same dtype; a number is an array without axes.
    """
    if is_array_type(batch_type):
        return batch_type
    origin, args = typing.get_origin(batch_type), typing.get_args(batch_type)
    if isinstance(origin, type) and issubclass(origin, Sequence) and args:
        return args[0]
    return Any


def _is_batch_of(kind: Any, item: Any) -> bool:
    """Report whether a hint is a list of such items, of a known type that is no list itself."""
    return not (item is Any or is_list(item)) and is_list(kind) and _item_type(kind) == item


def _takes_a_batch(hook: str, kind: Any, item: str, way_out: str = "") -> TypeError:
    """Make the error for a hook whose type hint says that it takes the whole batch."""
    return TypeError(
        f"{hook} takes {_shown(kind)} by its hint, but it is called with one item at a time, and {item} for each:"
        f" process the whole batch in predict, or in a stage of its own.{way_out}"
    )


def _shown(kind: Any) -> str:
    name = getattr(kind, "__name__", None)
    return str(name) if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")
