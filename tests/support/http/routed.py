"""A service with addresses of its own, and what makes items of what is sent there."""

from __future__ import annotations

import os
from dataclasses import dataclass

import carpool
from carpool import Model, Response, Service, Stage, ValidationError


@dataclass
class Link:
    """Where a picture is."""

    url: str
    times: int = 1


class Longest(Model):
    """The length of a picture, in which process, and with how many others."""

    examples = (b"abc",)

    def predict(self, pictures: list[bytes]) -> list[tuple[int, int, int]]:
        return [(len(picture), os.getpid(), len(pictures)) for picture in pictures]


def fetch(body: Link) -> bytes:
    """A picture of as many bytes as the address has; some addresses mean trouble."""
    if body.url == "broken":
        raise ConnectionError("no such host: secret.internal")
    if body.url == "refused":
        raise carpool.HTTPError("not from there", status=409, code="foreign")
    if body.url == "unfit":
        raise ValidationError("no picture is at this address")
    return body.url.encode() * body.times


def turned(picture: bytes) -> bytes:
    """Takes bytes as they are."""
    return picture[::-1]


async def fetch_on_the_loop(body: Link) -> bytes:
    return fetch(body)


async def lengths_on_the_loop(pictures: list[bytes]) -> list[tuple[int, int, int]]:
    return [(len(picture), os.getpid(), len(pictures)) for picture in pictures]


def itself(text: str) -> str:
    return text


def shout(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]


ROUTES = {"/classify": None, "/classify_url": fetch, "/v1/classify:turned": turned}
pictures = Service(Stage(Longest, max_batch_size=16), name="pictures", routes=ROUTES)
inside = Service(Stage(Longest, max_batch_size=16, run_in="thread"), name="inside", routes={"/inside": fetch})
on_the_loop = Service(
    Stage(lengths_on_the_loop, max_batch_size=16, run_in="loop"), name="loop", routes={"/loop": fetch_on_the_loop}
)


class Answers(Model):
    """Each item says what its answer is."""

    def predict(self, wishes: list[str]) -> list[str | Response]:
        return [self._answer(wish) for wish in wishes]

    def _answer(self, wish: str) -> str | Response:
        if wish == "raise":
            raise RuntimeError("the secret is 1234")
        if wish == "created":
            return Response("made", status=201, headers={"Location": "/7"})
        if wish == "picture":
            return Response(b"png", content_type="image/png")
        return wish if wish != "nothing" else Response(status=204)


answers = Service(Stage(Answers, max_batch_size=16), name="answers")
