"""What type checkers must find: each line that ends in `# wrong` is reported, and no other one is."""

import carpool
from tests.typing.batched import Translator, fetch, length
from tests.typing.services import Bare, Later, Many, One

length(3)  # wrong
wrong: str = length("a")  # wrong
Translator().translate(b"a")  # wrong
length.many("a", "b")  # wrong
length.submit(3)  # wrong
length.submit("a", first=True)  # wrong
wrong_ticket: carpool.Ticket[str] = length.submit("a")  # wrong
carpool.batch(max_batch_size="many")  # wrong
carpool.batch(policy="adaptiv")  # wrong
carpool.batch(max_batchsize=8)  # wrong
carpool.batch(3)  # wrong
carpool.batch(Bare)(3)  # wrong
carpool.batch(max_batch_size=8)(Many)("text")  # wrong
wrong_length: str = carpool.batch(Bare)("a")  # wrong
carpool.Stage(One, policy="adaptiv")  # wrong
carpool.Stage(One, run_in="proces")  # wrong
carpool.Stage(One, workers="2")  # wrong
carpool.Stage(One, max_batchsize=8)  # wrong
carpool.Stage(One, env=[{"A": 1}])  # wrong
carpool.Stage(One, devices=1.5)  # wrong
carpool.Stage(One, devices=[1.5])  # wrong
wrong_index: str = carpool.worker_index()  # wrong
carpool.Service(One, overload="both")  # wrong
carpool.Service(3)  # wrong


async def awaited() -> None:
    missing: str = fetch(b"a")  # wrong
    await fetch("a")  # wrong
    answer: str = await carpool.batch(Later)("a")  # wrong
    print(missing, answer)


@carpool.batch  # wrong
def of_one(x: str) -> int:
    return len(x)


@carpool.batch(max_batch_size=8)  # wrong
def gives_one(xs: list[str]) -> int:
    return len(xs)
