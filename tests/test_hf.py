"""Rows of a KV cache for decoders of Hugging Face: each stream gets what `generate()` gives it alone."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import carpool
from carpool.testing import check_steps

NO_TRANSFORMERS = """
import sys, carpool
assert not {"torch", "transformers"} & set(sys.modules), "import carpool has loaded them"
sys.modules["torch"] = sys.modules["transformers"] = None
try:
    import carpool.hf
except ImportError as error:
    print(error)
"""


def test_without_transformers_the_error_names_the_extra() -> None:
    """`import carpool` never imports transformers, and `carpool.hf` says what it needs."""
    done = subprocess.run([sys.executable, "-c", NO_TRANSFORMERS], capture_output=True, text=True, timeout=60)
    assert "carpool.hf needs torch and transformers: pip install 'carpool[hf]'" in done.stdout, done.stderr


ROWS, LONGEST, VOCABULARY = 6, 64, 500


def _transformers() -> Any:
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


def gpt2(**settings: Any) -> Any:
    t = _transformers()
    return t.GPT2LMHeadModel(
        t.GPT2Config(
            n_layer=2,
            n_embd=64,
            n_head=4,
            vocab_size=VOCABULARY,
            n_positions=LONGEST,
            initializer_range=0.3,
            bos_token_id=0,
            eos_token_id=0,
            **settings,
        )
    )


LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.3,
}


def llama(**settings: Any) -> Any:
    t = _transformers()
    return t.LlamaForCausalLM(t.LlamaConfig(**LLAMA, **settings))


def seeded(make: Callable[..., Any], **settings: Any) -> Any:
    """A model with random weights, the same ones each time."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return make(**settings).eval()


@dataclass
class Sequence:
    """The state of one stream."""

    row: Any
    last: int
    left: int


class Generate(carpool.Model):
    """A decoder in steps; an item is its prompt and how many tokens to add."""

    make: Callable[..., Any]

    def setup(self) -> None:
        from carpool.hf import Rows

        self.rows = Rows(seeded(type(self).make), ROWS, LONGEST)

    def start(self, xs: list[tuple[list[int], int]]) -> list[Sequence]:
        return self.resume(xs, [[]] * len(xs))

    def resume(self, xs: list[tuple[list[int], int]], parts: list[list[int]]) -> list[Sequence]:
        ids = [prompt + said for (prompt, _), said in zip(xs, parts, strict=True)]
        rows = self.rows.take_all([each[:-1] for each in ids])
        return [
            Sequence(row, each[-1], most - len(said))
            for row, each, (_, most), said in zip(rows, ids, xs, parts, strict=True)
        ]

    def step(self, states: list[Sequence]) -> list[Any]:
        logits = self.rows.forward([s.row for s in states], [[s.last] for s in states])
        for s, token in zip(states, logits.argmax(-1).tolist(), strict=True):
            s.last, s.left = token, s.left - 1
        return [s.last if s.left else carpool.Last(s.last) for s in states]

    def stop(self, state: Sequence) -> None:
        self.rows.give(state.row)


class GenerateGPT2(Generate):
    make = gpt2


class GenerateLlama(Generate):
    make = llama


def prompts(n: int) -> list[tuple[list[int], int]]:
    import random

    dice = random.Random(1)
    return [
        ([dice.randrange(1, VOCABULARY) for _ in range(dice.randint(1, 30))], dice.randint(3, 30)) for _ in range(n)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("model", [GenerateGPT2, GenerateLlama])
def test_streams_in_company_get_what_generate_gives_each_alone(model: type[Generate]) -> None:
    """Twenty streams that join, leave, pause and resume get the tokens of `generate()`, in float32."""
    _transformers()
    import torch

    xs = prompts(20)
    check_steps(model, xs, streams=60, max_batch_size=ROWS, seed=1)

    decoder, stepped = seeded(model.make), model()
    stepped.setup()
    for ids, most in xs:
        given = torch.tensor([ids])
        with torch.inference_mode():
            whole = decoder.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=most,
                min_new_tokens=most,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        states = stepped.start([(ids, most)])
        tokens = [stepped.step(states)[0] for _ in range(most)]
        stepped.stop(states[0])
        assert [*tokens[:-1], tokens[-1].value] == whole[0, len(ids) :].tolist()


@pytest.mark.slow
def test_the_service_of_the_page_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program in docs/streaming.md generates in a worker process, and its cache is right; all
    that is changed is where its model comes from.
    """
    _transformers()
    page = (Path(__file__).parent.parent / "docs" / "streaming.md").read_text()
    (program,) = re.findall(r"```python\n(# generate\.py\n.*?)```", page, re.DOTALL)
    seeded(llama).save_pretrained(tmp_path / "model")
    program = re.sub(r"^NAME, .*$", f"NAME, STREAMS, LONGEST = {str(tmp_path / 'model')!r}, 4, 64", program, flags=re.M)
    (tmp_path / "generate.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    page_model: Any = importlib.import_module("generate")

    check_steps(page_model.Generate, [page_model.Prompt(ids, n) for ids, n in prompts(6)], streams=30, max_batch_size=4)
    alone = page_model.Generate()
    alone.setup()
    ids, n = prompts(1)[0]
    states = alone.start([page_model.Prompt(ids, n)])
    expected = [alone.step(states)[0] for _ in range(n - 1)]
    with page_model.service.run() as s:
        assert s.predict(page_model.Prompt(ids, n))[:-1] == expected
        with pytest.raises(carpool.ValidationError, match="a prompt and its answer have 1 to 64 tokens"):
            s.predict(page_model.Prompt(ids, 64))


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_neighbours_change_nothing_bit_by_bit(make: Callable[..., Any], attention: str, kind: str) -> None:
    """The logits of a row are the same, to the last bit, whatever the rows beside it hold, and
    whatever the last one in its place has held.
    """
    _transformers()
    import torch

    from carpool.hf import Rows

    def run(neighbours: list[list[int]], before: float) -> list[Any]:
        model = seeded(make, attn_implementation=attention).to(getattr(torch, kind))
        rows = Rows(model, 4, LONGEST)
        for _ in range(2):  # numbers that are not finite are left behind in the first two rows
            rows.take(list(range(1, 40)))
        with torch.inference_mode():
            for layer in rows._layers:
                layer.keys[:2, :, :39] = layer.values[:2, :, :39] = before
        for row in list(rows._in_use):
            rows.give(row)
        streams = [rows.take(neighbours[0]), rows.take([5, 6, 7]), rows.take(neighbours[1])]
        return [rows.forward(streams, [[neighbours[0][i]], [8 + i], [neighbours[1][i]]])[1] for i in range(6)]

    ones = run([list(range(1, 20)), list(range(30, 40))], 0.0)
    others = run([list(range(200, 219)), list(range(450, 460))], float("nan"))
    assert all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.slow
def test_rows_are_counted_and_have_room() -> None:
    """A row too many and a token too many are refused, and nothing is lost by it."""
    _transformers()
    from carpool.hf import Rows

    rows = Rows(seeded(llama), 2, 16)
    first = rows.take(range(15))
    with pytest.raises(ValueError, match="a row would hold 17 tokens, and longest=16: end its stream before that"):
        rows.take(range(17))
    assert rows.free == 1
    with pytest.raises(RuntimeError, match="all 2 rows are in use"):
        rows.take_all([[1], [2]])
    assert rows.free == 1
    second = rows.take([])
    with pytest.raises(RuntimeError, match="all 2 rows are in use: make as many as the stage's max_batch_size"):
        rows.take([1])
    rows.forward([second, first], [[1], [2]])
    with pytest.raises(ValueError, match="a row would hold 17 tokens"):
        rows.forward([first, second], [[1], [2]])
    rows.give(first)
    assert (rows.free, second.index, second.length) == (1, 0, 1)


def short() -> Any:
    t = _transformers()
    return t.LlamaForCausalLM(t.LlamaConfig(**{**LLAMA, "max_position_embeddings": 32}))


def mistral(window: int | None) -> Any:
    t = _transformers()
    return t.MistralForCausalLM(t.MistralConfig(**LLAMA, sliding_window=window))


def gemma() -> Any:
    t = _transformers()
    return t.Gemma3ForCausalLM(t.Gemma3TextConfig(**LLAMA, head_dim=8, sliding_window=32))


def t5() -> Any:
    t = _transformers()
    return t.T5ForConditionalGeneration(
        t.T5Config(d_model=32, d_ff=64, num_layers=1, num_heads=4, d_kv=8, vocab_size=50)
    )


def mamba() -> Any:
    t = _transformers()
    return t.MambaForCausalLM(t.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=50, state_size=4))


def qwen3_next() -> Any:
    t = _transformers()
    types = ["linear_attention", "full_attention"]
    return t.Qwen3NextForCausalLM(
        t.Qwen3NextConfig(**LLAMA, head_dim=8, layer_types=types, num_experts=2, num_experts_per_tok=1)
    )


def bloom() -> Any:
    t = _transformers()
    return t.BloomForCausalLM(t.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=50))


def flash() -> Any:
    model = seeded(llama)
    model.config._attn_implementation = "flash_attention_2"
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: mistral(32), "has a sliding window of 32 tokens, .*so set longest=32 at most"),
        (gemma, "has a sliding window of 32 tokens"),
        (t5, "T5ForConditionalGeneration has an encoder"),
        (mamba, "MambaForCausalLM has layers with .*, and Rows takes full attention only"),
        (qwen3_next, "has layers with linear_attention, and Rows takes full attention only"),
        (bloom, "BloomForCausalLM (takes no position_ids|cannot be stepped in rows)"),
        (flash, "attn_implementation='flash_attention_2', which takes no mask of rows"),
        (short, "longest=64 is more than the 32 positions"),
    ],
)
def test_other_decoders_are_refused(make: Callable[[], Any], told: str) -> None:
    """What is no decoder with full attention is refused, and the error says why."""
    _transformers()
    from carpool.hf import Rows

    with pytest.raises(ValueError, match=told):
        Rows(seeded(make), 4, LONGEST)


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: mistral(64), lambda: mistral(None), lambda: gemma()])
def test_a_window_that_holds_all_is_full_attention(make: Callable[[], Any]) -> None:
    """A decoder with a sliding window is taken where no row grows beyond it."""
    _transformers()
    from carpool.hf import Rows

    rows = Rows(seeded(make), 4, 32)
    assert rows.forward([rows.take([1, 2])], [[3]]).shape == (1, VOCABULARY)


@pytest.mark.slow
def test_a_decoder_that_ignores_its_mask_is_refused() -> None:
    """A model that says other things in rows than without a cache is refused, whatever it is called."""
    _transformers()
    from carpool.hf import Rows

    model = seeded(llama)
    forward = model.model.forward
    model.model.forward = lambda *args, attention_mask=None, **more: forward(
        *args, attention_mask=None if attention_mask is None else attention_mask | True, **more
    )
    with pytest.raises(ValueError, match="its logits then differ from those without a cache"):
        Rows(model, 4, LONGEST)
