"""Rows of a KV cache, for decoders of Hugging Face in models of steps; needs `carpool[hf]`.

`Rows` runs any decoder with full attention for many streams at a time, each of its own length.
Streams come and go between any two steps, and nothing is padded or copied for it but one row, which
moves into the gap of one that is given back. "Answers in parts" in the docs has a whole model.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

try:
    import torch
    from transformers.cache_utils import Cache, CacheLayerMixin
except ImportError as error:
    raise ImportError(f"carpool.hf needs torch and transformers: pip install 'carpool[hf]' ({error})") from error

__all__ = ["CacheRow", "Rows"]

_MASKS = {"sdpa", "eager"}  # kinds of attention that take a mask of any shape
_TRIED = (5, 9)  # lengths of the two rows with which a model is tried
_MOST_OFF = {torch.float64: 1e-6, torch.float32: 1e-3}  # of what the logits spread; rounding is all that may differ
_MOST_OFF_ELSE = 0.1


class CacheRow:
    """A row of the cache, which one stream has.

    Attributes:
        index: Its place in the cache. It changes when a row before it is given back.
        length: How many tokens it has taken in.
    """

    __slots__ = ("index", "length")

    def __init__(self, index: int) -> None:
        self.index = index
        self.length = 0


class Rows:
    """A KV cache of rows, and the decoder that reads and writes it.

    The rows in use are the first ones, so that a step of all of them works on views of the cache.
    What is in one row has no influence on another.

    Args:
        model: A decoder of Hugging Face with full attention, on its device.
        rows: How many there are: the `max_batch_size` of the stage, or its `max_rows`.
        longest: The most tokens of one row, with those that are added.

    Attributes:
        free: How many rows can be taken.

    Raises:
        ValueError: The model works in another way; the text says in which.
    """

    def __init__(self, model: Any, rows: int, longest: int) -> None:
        config = _checked_config(model, longest)
        self._model = model
        self._n = rows
        self._longest = longest
        self._in_use: list[CacheRow] = []
        self._layers = [_Layer(rows, longest) for _ in range(config.num_hidden_layers)]
        self._cache = Cache(layers=list(self._layers))
        self._takes_bools = config._attn_implementation == "sdpa"  # `eager` adds its mask
        parameters = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._takes_cache_as = "cache" if "cache" in parameters else "past_key_values"  # newer and older transformers
        self._try()

    @property
    def free(self) -> int:
        """How many rows can be taken."""
        return self._n - len(self._in_use)

    def take(self, ids: Sequence[int]) -> CacheRow:
        """Return a row that has taken in these tokens.

        Args:
            ids: The tokens; there may be none.

        Raises:
            RuntimeError: All rows are in use.
            ValueError: There are more tokens than a row has room for.
        """
        if not self.free:
            raise RuntimeError(f"all {self._n} rows are in use: make as many as the stage's max_batch_size or max_rows")
        row = CacheRow(len(self._in_use))
        self._in_use.append(row)
        if len(ids):
            try:
                self.forward([row], [ids])
            except BaseException:
                self.give(row)
                raise
        return row

    def take_all(self, prompts: Sequence[Sequence[int]]) -> list[CacheRow]:
        """Return a row for each of several prompts, see `take`; if one cannot be had, take none.

        So a `start` that raises leaves nothing behind, and can be called again with fewer items.
        """
        taken: list[CacheRow] = []
        try:
            for ids in prompts:
                taken.append(self.take(ids))
        except BaseException:
            for row in reversed(taken):
                self.give(row)
            raise
        return taken

    def forward(self, rows: Sequence[CacheRow], ids: Sequence[Sequence[int]]) -> Any:
        """Have rows take in tokens, and return the logits after the last token of each.

        Args:
            rows: Some of those that are in use, in any order.
            ids: As many tokens for each of them.

        Returns:
            A tensor of shape (rows, vocabulary).

        Raises:
            ValueError: A row has no room for these tokens.
        """
        n = len(ids[0])
        seen = max(row.length for row in rows) + n
        if seen > self._longest:
            raise ValueError(f"a row would hold {seen} tokens, and longest={self._longest}: end its stream before that")
        with torch.inference_mode():
            device = self._model.device
            at = torch.tensor([[row.length] for row in rows], device=device) + torch.arange(n, device=device)
            window = _Window([row.index for row in rows], at, seen)
            for layer in self._layers:
                layer.window = window
            out = self._model(
                input_ids=torch.tensor([list(each) for each in ids], device=device),
                position_ids=at,
                attention_mask=self._mask(at, seen),
                use_cache=True,
                **{self._takes_cache_as: self._cache},
                **self._last_only,
            )
        for row in rows:
            row.length += n
        return out.logits[:, -1]

    def give(self, row: CacheRow) -> None:
        """Give a row back; the last one moves into the gap."""
        last = self._in_use.pop()
        with torch.inference_mode():
            for layer in self._layers:
                layer.move(last, row)
        last.index = row.index
        if last is not row:
            self._in_use[last.index] = last

    def _mask(self, at: torch.Tensor, seen: int) -> torch.Tensor:
        """Return which places each token may look at, of shape (rows, 1, tokens, places)."""
        mask = torch.arange(seen, device=at.device) <= at[:, None, :, None]
        if self._takes_bools:
            return mask
        dtype = self._model.dtype
        return torch.zeros(mask.shape, dtype=dtype, device=at.device).masked_fill(~mask, torch.finfo(dtype).min)

    def _try(self) -> None:
        """Step two rows together, and compare them with what the model says without a cache."""
        name = type(self._model).__name__
        lengths = [n for n in _TRIED[: self._n] if n < self._longest]
        prompts = [[2 + (i * n) % 7 for i in range(n + 1)] for n in lengths]
        try:
            rows = self.take_all([ids[:-1] for ids in prompts])
            together: Any = self.forward(rows, [ids[-1:] for ids in prompts]) if rows else ()
            for row in rows:
                self.give(row)
            with torch.inference_mode():
                ids_alone = [torch.tensor([ids], device=self._model.device) for ids in prompts]
                alone = [self._model(input_ids=ids, use_cache=False).logits[0, -1] for ids in ids_alone]
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise ValueError(f"{name} cannot be stepped in rows: it raised {type(error).__name__}: {error}") from error
        for one, other in zip(together, alone, strict=True):
            off = float((one.double() - other.double()).abs().max() / other.double().std())
            if not off <= _MOST_OFF.get(one.dtype, _MOST_OFF_ELSE):
                raise ValueError(
                    f"{name} cannot be stepped in rows: its logits then differ from those without a cache,"
                    f" by {off:.2g} of their spread. Its attention depends on more than a mask and positions"
                )


class _Window:
    """What one forward pass reads and writes of each layer's cache.

    Attributes:
        rows: The rows that it is for: a slice if they lie side by side, else a tensor.
        seen: How many places of each it reads.
    """

    def __init__(self, indices: list[int], at: torch.Tensor, seen: int) -> None:
        first, n = indices[0], len(indices)
        self._indices = torch.tensor(indices, device=at.device)
        self._at = at
        self.seen = seen
        lie_side_by_side = indices == list(range(first, first + n))
        self.rows = slice(first, first + n) if lie_side_by_side else self._indices

    def places(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows and the places in them that are written, for a layer on a device."""
        return self._indices.to(device)[:, None], self._at.to(device)


class _Layer(CacheLayerMixin):
    """The cache of one layer: keys and values of shape (rows, heads, longest, size of a head).

    Attributes:
        window: What the present forward pass reads and writes.
    """

    def __init__(self, rows: int, longest: int) -> None:
        super().__init__()
        self.window: _Window
        self._n = rows
        self._longest = longest

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        self.keys, self.values = (
            each.new_zeros(self._n, each.shape[1], self._longest, each.shape[3]) for each in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.window
        rows, at = window.places(self.keys.device)
        self.keys[rows, :, at], self.values[rows, :, at] = key_states.transpose(1, 2), value_states.transpose(1, 2)
        return self.keys[window.rows, :, : window.seen], self.values[window.rows, :, : window.seen]

    def move(self, last: CacheRow, row: CacheRow) -> None:
        """Move the last row into the place of another, and clear what neither holds any more.

        Places beyond the end of a row are masked, but not even a mask hides numbers that are not
        finite: a stream that overflows must not harm the next one in its place.
        """
        if not self.is_initialized:
            return
        for each in (self.keys, self.values):
            if last is not row:
                each[row.index, :, : last.length] = each[last.index, :, : last.length]
                each[row.index, :, last.length : row.length] = 0
            each[last.index, :, : last.length] = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.seen, 0

    def get_seq_length(self) -> int:
        """Return zero, as there is no length that all rows have: positions are always given."""
        return 0

    def get_max_length(self) -> int:
        return self._longest


def _checked_config(model: Any, longest: int) -> Any:
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} has an encoder, which Rows cannot run: it takes decoders alone")
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds or getattr(model, "_is_stateful", False):
        what = ", ".join(sorted(kinds)) or "a state besides keys and values"
        raise ValueError(f"{name} has layers with {what}, and Rows takes full attention only")
    window = getattr(config, "sliding_window", None)
    if window and longest > window:
        raise ValueError(
            f"{name} has a sliding window of {window} tokens, and Rows takes full attention only: the two are the same"
            f" within the window, so set longest={window} at most"
        )
    most = getattr(config, "max_position_embeddings", None)
    if most and longest > most:
        raise ValueError(f"longest={longest} is more than the {most} positions of {name}")
    if config._attn_implementation not in _MASKS:
        raise ValueError(
            f"{name} was loaded with attn_implementation={config._attn_implementation!r}, which takes no mask of rows:"
            " load it with attn_implementation='sdpa'"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{name} takes no position_ids, so its rows cannot have lengths of their own")
    return config
