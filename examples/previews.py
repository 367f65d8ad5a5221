"""A diffusion model in small: thirty equal steps make an image of noise, and callers see previews.

python -m examples.previews     draws letters, and shows how one of them comes out of the noise
carpool serve examples.previews:service
curl -N localhost:8000/predict -d '{"letter": "C", "seed": 7}' -H 'Accept: text/event-stream'

All images under way take their next step in one call, whatever step each of them is at. The
denoiser is the exact one for a few letters in many places, so that nothing needs to be trained.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

import carpool
from carpool.testing import check_steps

STEPS, EVERY = 30, 5  # a preview comes after each fifth step
SIDE = 10
LETTERS = {
    "C": " #### #     #     #     #      #### ",
    "H": "#    ##    ########    ##    ##    #",
    "L": "#     #     #     #     #     ######",
}
NOISE = np.append(np.geomspace(8.0, 0.05, STEPS), 0.0)  # the noise in an image before each step, and at the end


class Wish(msgspec.Struct):
    """What a client asks for; the same seed gives the same image."""

    letter: Literal["C", "H", "L"]
    seed: int


class Preview(msgspec.Struct):
    """What the model takes the image for after some steps, as lines of text."""

    steps: int
    image: list[str]


@dataclass(eq=False)
class Canvas:
    """The state of one stream: its pixels with noise, and how many steps have been made."""

    letter: str
    pixels: Any
    steps: int = 0


class Draw(carpool.Model):
    """A model of equal steps: images join at any of them, and none waits for another."""

    examples = (Wish("C", 1),)

    def setup(self) -> None:
        self.known = {letter: placed(shape) for letter, shape in LETTERS.items()}

    def start(self, wishes: list[Wish]) -> list[Canvas]:
        return [
            Canvas(wish.letter, NOISE[0] * np.random.default_rng(wish.seed).normal(size=SIDE * SIDE)) for wish in wishes
        ]

    def resume(self, wishes: list[Wish], parts: list[list[Preview]]) -> list[Canvas]:
        """Go on after these previews. They do not hold the noise, so the steps are made again."""
        canvases = self.start(wishes)
        for canvas, previews in zip(canvases, parts, strict=True):
            while canvas.steps < previews[-1].steps:
                self.step([canvas])
        return canvases

    def step(self, canvases: list[Canvas]) -> list[Preview | carpool.Last[Preview] | None]:
        now = np.array([NOISE[each.steps] for each in canvases])[:, None]
        then = np.array([NOISE[each.steps + 1] for each in canvases])[:, None]
        noisy = np.stack([each.pixels for each in canvases])
        clean = self.denoise(noisy, np.stack([self.known[each.letter] for each in canvases]), now)
        for each, pixels in zip(canvases, clean + (noisy - clean) * then / now, strict=True):
            each.pixels, each.steps = pixels, each.steps + 1
        return [self.part(each, image) for each, image in zip(canvases, clean, strict=True)]

    def denoise(self, noisy: Any, known: Any, noise: Any) -> Any:
        """Return the mean of all images that each noisy one may have been made of."""
        off = ((noisy[:, None] - known) ** 2).sum(-1) / (2 * noise**2)
        weight = np.exp(off.min(-1, keepdims=True) - off)
        return (weight[:, :, None] * known).sum(1) / weight.sum(-1, keepdims=True)

    def part(self, canvas: Canvas, image: Any) -> Preview | carpool.Last[Preview] | None:
        """Return the image after the last step, a preview after each fifth, and else nothing."""
        if canvas.steps % EVERY:
            return None
        shades = np.array(list(" .:*#"))[(image.clip(0, 1) * 4 + 0.5).astype(int)].reshape(SIDE, SIDE)
        preview = Preview(canvas.steps, ["".join(row) for row in shades])
        return carpool.Last(preview) if canvas.steps == STEPS else preview

    def stop(self, canvas: Canvas) -> None:
        """Nothing to free: a canvas has no place in a cache."""

    def collect(self, previews: list[Preview]) -> list[str]:
        """Make the answer of those who wait for the image: the last preview."""
        return previews[-1].image


def placed(shape: str) -> Any:
    """Return the images of a letter in all places, of shape (places, pixels)."""
    letter = (np.array(list(shape)) == "#").reshape(6, 6)
    corners = range(SIDE - 5)
    images = np.zeros((len(corners), len(corners), SIDE, SIDE))
    for top in corners:
        for left in corners:
            images[top, left, top : top + 6, left : left + 6] = letter
    return images.reshape(-1, SIDE * SIDE)


def is_letter(letter: str, image: list[str]) -> bool:
    """Report whether an image is a letter in one of its places, without a trace of noise."""
    pixels = np.array([c == "#" for c in "".join(image)])
    return set("".join(image)) <= {" ", "#"} and bool((placed(LETTERS[letter]) == pixels).all(-1).any())


service = carpool.Service(carpool.Stage(Draw, max_batch_size=16), name="letters")


def main() -> None:
    """Draw some letters at the same time, and show how one of them comes about."""
    wishes = [Wish(letter, seed) for seed in range(8) for letter in ("C", "H", "L")]
    check_steps(Draw, wishes[:6], streams=40)
    print("in company each image is what it is alone")
    with service.run() as s, ThreadPoolExecutor(16) as threads:
        images = list(threads.map(s.predict, wishes))
        with s.predict_stream(wishes[0]) as parts:
            previews = list(parts)
    print(*(f"step {each.steps}".ljust(SIDE) for each in previews), sep=" | ")
    for rows in zip(*(each.image for each in previews), strict=True):
        print(*rows, sep=" | ")
    right = sum(is_letter(wish.letter, image) for wish, image in zip(wishes, images, strict=True))
    print(f"{right} of {len(images)} images are the letters wished for")
    print("the last preview is the image:", previews[-1].image == images[0])


if __name__ == "__main__":
    main()
