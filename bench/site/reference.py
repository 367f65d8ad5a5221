"""The pages of the reference that are made from the code: Python names, and the metrics.

All of it is read from the syntax trees, so that nothing is imported: `carpool.hf` needs torch, and
`carpool.ray` needs Ray.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from bench import ROOT

SOURCE: Final = ROOT / "src"


class Group(NamedTuple):
    """A page of the reference of Python names.

    Attributes:
        page: Its file, below `reference/`.
        title: Its title.
        about: What it holds, in a line.
        names: The public names on it, or modules, which stand for all of theirs that no other page
            has.
    """

    page: str
    title: str
    about: str
    names: tuple[str, ...]


GROUPS: Final = (
    Group(
        "services",
        "Models and services",
        "A model class, its stages, the service, and the handle of a service that runs",
        (
            "carpool.Model",
            "carpool.Stage",
            "carpool.Service",
            "carpool.Handle",
            "carpool.AsyncHandle",
            "carpool.Join",
            "carpool.worker_index",
            "carpool.Parallel",
            "carpool.Route",
            "carpool.ForEach",
            "carpool.To",
            "carpool.Done",
            "carpool.END",
            "carpool.End",
            "carpool.Last",
        ),
    ),
    Group(
        "functions",
        "Functions",
        "`@carpool.batch` over a function or a coroutine function, and its tools",
        ("carpool.batch", "carpool.Ticket", "carpool.Lock", "carpool.pad"),
    ),
    Group(
        "http",
        "HTTP",
        "The server, the ASGI app, requests and answers of a model's own format, errors in your own routes",
        (
            "carpool.serve",
            "carpool.lifespan",
            "carpool.HTTPRequest",
            "carpool.Response",
            "carpool.HTTPError",
            "carpool.collector",
            "carpool.http",
        ),
    ),
    Group("client", "Clients", "Clients for a server of carpool", ("carpool.Client", "carpool.AsyncClient")),
    Group(
        "errors",
        "Exceptions",
        "The exceptions that callers catch",
        (
            "carpool.CarpoolError",
            "carpool.DeadlineExceeded",
            "carpool.InvalidRequest",
            "carpool.ModelError",
            "carpool.Overloaded",
            "carpool.StartupError",
            "carpool.Unavailable",
            "carpool.ValidationError",
        ),
    ),
    Group("policy", "Policies", "Policies of batching, and the parts of one's own", ("carpool.engine.policy",)),
    Group("frames", "Tables", "Models of tables", ("carpool.frames",)),
    Group("openai", "OpenAI's items", "The items of models that clients of OpenAI ask", ("carpool.openai",)),
    Group("hf", "Hugging Face", "Rows of a KV cache for decoders of Hugging Face", ("carpool.hf",)),
    Group("testing", "Testing", "Tools to test a service, a model or a policy", ("carpool.testing",)),
    Group("simulate", "Simulation", "Policies compared in virtual time", ("carpool.simulate",)),
    Group("ray", "Ray", "Services on a Ray cluster", ("carpool.ray",)),
    Group("types", "Types", "What statistics and streams are made of, for type checkers", ("carpool.types",)),
)

MEMBERS: Final = {
    "carpool.Stage": (),
    "carpool.Service": ("run", "run_async", "serve", "start"),
    "carpool.AsyncHandle": (
        *("close", "join_address", "pids", "predict", "predict_stream", "reload", "scale", "start", "state", "stats"),
        *("story", "stream"),
    ),
    "carpool.http.App": ("start", "stop"),
}
"""The public members of classes that have others for carpool's own parts."""

MODULES: Final = ("carpool", *(name for group in GROUPS for name in group.names if name.rpartition(".")[2].islower()))
"""`carpool` and candidates for modules; `modules()` leaves out the functions among them."""

ALIASES: Final = frozenset({"carpool.engine.policy"})
"""Modules of which names are in `carpool`, too; the page shows the shorter name."""


def modules() -> list[str]:
    """Return the public modules."""
    return list(dict.fromkeys(name for name in MODULES if file_of(name) is not None))


def file_of(module: str) -> Path | None:
    """Return the file of a module; None if there is no such module."""
    folder = SOURCE.joinpath(*module.split("."))
    candidates = (folder / "__init__.py", folder.with_suffix(".py"))
    return next((path for path in candidates if path.exists()), None)


@cache
def exported(module: str) -> list[str]:
    """Return `__all__` of a module, without submodules."""
    path = file_of(module)
    assert path is not None, module
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name("__all__")], value=ast.List(elts=found)):
                names = [str(each.value) for each in found if isinstance(each, ast.Constant)]
                return [name for name in names if module != "carpool" or file_of(f"{module}.{name}") is None]
            case ast.ImportFrom(module=str(other), names=names) if "__all__" in {each.name for each in names}:
                return exported(other)  # an old path of names that live elsewhere
    raise LookupError(f"{module} has no __all__")


def public() -> list[str]:
    """Return all public names, each once: a name that `carpool` has too is only there."""
    short = set(exported("carpool"))
    found = [f"carpool.{name}" for name in exported("carpool")]
    for module in modules()[1:]:
        found += [f"{module}.{name}" for name in exported(module) if name not in short or module not in ALIASES]
    return found


def names_of(group: Group) -> list[str]:
    """Return the public names on a page, in the order in which they are there."""
    placed = {name for each in GROUPS for name in each.names}
    found = []
    for name in group.names:
        if name in modules():
            found += [each for each in public() if each.rpartition(".")[0] == name and each not in placed]
            if name in ALIASES:
                both = [f"carpool.{each}" for each in exported(name) if each in exported("carpool")]
                found = sorted([*found, *(each for each in both if each not in placed)], key=lambda n: n.split(".")[-1])
        else:
            found.append(name)
    return found


def python_pages() -> dict[str, str]:
    """Return the pages of Python names, by their paths."""
    rows = "".join(f"| [{group.title}](reference/{group.page}.md) | {group.about} |\n" for group in GROUPS)
    pages = {"reference.md": f"\n| page | |\n|---|---|\n{rows}"}
    for group in GROUPS:
        lines = [f"# {group.title}\n", f"{group.about}.\n"]
        for name in names_of(group):
            lines.append(f"::: {name}\n")
            if name in MEMBERS:
                shown = "".join(f"\n        - {each}" for each in MEMBERS[name]) or " false"
                lines[-1] += f"    options:\n      members:{shown}\n"
        pages[f"reference/{group.page}.md"] = "\n".join(lines)
    return pages


class Metric(NamedTuple):
    """A metric that the server has.

    Attributes:
        name: As `/metrics` has it.
        kind: "counter", "gauge" or "histogram".
        labels: Their names.
        about: Its help text.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    about: str


def metrics() -> list[Metric]:
    """Return the metrics, as the code that collects them makes their families."""
    found = []
    for path in sorted((SOURCE / "carpool").rglob("*.py")):
        if "MetricFamily(" not in (text := path.read_text()):
            continue
        tree = ast.parse(text)
        named = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            match node:
                case ast.Call(
                    func=ast.Name(id=kind), args=[ast.Constant(value=str(name)), ast.Constant(value=str(about)), *_]
                ) if kind.endswith("MetricFamily"):
                    kind = kind.removesuffix("MetricFamily").lower()
                    labels = next((each.value for each in node.keywords if each.arg == "labels"), None)
                    full = f"{name}_total" if kind == "counter" else name
                    found.append(Metric(full, kind, _labels(labels, named), about))
    return sorted(found)


def _labels(node: ast.expr | None, named: dict[str, ast.expr]) -> tuple[str, ...]:
    """Return the labels that an expression stands for."""
    match node:
        case ast.Constant(value=str(name)):
            return (name,)
        case ast.Name(id=name):
            return _labels(named[name], named)
        case ast.Starred(value=inner):
            return _labels(inner, named)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return tuple(label for part in parts for label in _labels(part, named))
    return ()


def metrics_page() -> dict[str, str]:
    """Return the table of all metrics, by the page that it ends."""
    rows = "".join(
        f"| `{each.name}` | {each.kind} | {', '.join(f'`{label}`' for label in each.labels)} | {each.about} |\n"
        for each in metrics()
    )
    return {"metrics.md": f"\n## All metrics\n\n| name | kind | labels | |\n|---|---|---|---|\n{rows}"}
