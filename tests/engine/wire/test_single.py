"""Frames of one item in one buffer are written and read the quick way: the same bytes and frames."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.fast_paths import without
from carpool.engine.wire.frame import Frame, FrameKind, open_reply
from carpool.engine.wire.payload import LARGE
from tests.effort import examples
from tests.engine.wire.reading import BYTES, IDS, read, written

PAYLOADS = st.one_of(
    st.binary(max_size=40),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=9),
    st.none(),
    st.booleans(),
    st.lists(st.binary(max_size=9), min_size=1, max_size=3),
    st.sampled_from([b"x" * (LARGE - 1), b"x" * LARGE, bytearray(b"xy")]),
)
FRAMES = st.builds(
    Frame,
    kind=st.sampled_from(FrameKind),
    batch_id=IDS,
    ids=st.lists(IDS, min_size=1, max_size=1),
    formats=BYTES,
    accepts=st.one_of(BYTES, BYTES, st.just(b"")),
    deadlines=st.lists(st.floats(allow_nan=False), max_size=2).map(tuple),
    payloads=st.lists(PAYLOADS, min_size=1, max_size=1),
    made_at=st.floats(0, 10),
    busy_s=st.floats(0, 10),
    waited_s=st.floats(0, 10),
)


@examples(300)
@given(FRAMES)
def test_one_item_is_written_as_ever(frame: Frame) -> None:
    """The quick way writes the bytes of the long one, and refuses what that refuses."""
    quick = written(frame)
    with without("frames_of_one"):
        assert quick == written(frame)


@examples(300)
@given(st.lists(FRAMES, min_size=1, max_size=3), st.lists(st.integers(0), max_size=4), st.data())
def test_one_item_is_read_as_ever(several: list[Frame], cuts: list[int], data: st.DataObject) -> None:
    """The quick way reads the frames of the long one, however they are cut and whatever is wrong."""
    whole = bytearray(b"".join(filter(None, map(written, several))))
    if whole and data.draw(st.booleans()):
        whole[data.draw(st.integers(0, min(len(whole), 90) - 1))] ^= data.draw(st.integers(1, 255))
    quick = read(bytes(whole), cuts)
    with without("frames_of_one"):
        assert repr(quick) == repr(read(bytes(whole), cuts))


@examples(300)
@given(FRAMES, IDS, st.booleans(), st.data())
def test_a_lone_caller_reads_what_a_reader_reads(frame: Frame, id: int, is_its_own: bool, data: st.DataObject) -> None:
    """A reply is opened if it is the whole answer to the one request and no failure, and as a reader does."""
    if is_its_own:
        frame.batch_id = frame.ids[0] = id  # type: ignore[index]
    whole = bytearray(written(frame) or b"")
    if whole and data.draw(st.booleans()):
        whole[data.draw(st.integers(0, min(len(whole), 90) - 1))] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        whole += b"cpl"
    opened = open_reply(bytes(whole), id)
    seen = read(bytes(whole), [])
    found = [] if type(seen) is str or not seen[1] else [one for one, _ in seen[0]]
    if len(found) != 1 or len(found[0].ids) != 1:
        assert opened is None
        return
    (one,) = found
    if opened is not None:
        assert (one.kind, one.batch_id, one.ids, one.formats) == (FrameKind.REPLY, id, [id], b"\0")
        assert opened == (*one.payloads, one.busy_s, one.waited_s)
    elif (one.kind, one.batch_id, one.ids, one.formats) == (FrameKind.REPLY, id, [id], b"\0"):
        is_plain = type(one.payloads[0]) is bytes and 0 < len(one.payloads[0]) < LARGE - 100
        assert not is_plain or not (0 <= one.busy_s < float("inf") and 0 <= one.waited_s < float("inf"))
