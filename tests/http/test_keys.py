"""API keys: the lines of the file, who has a key, how long it is good, and how a file is read again."""

from __future__ import annotations

import hashlib
import os
from math import inf
from pathlib import Path

import pytest

from carpool.http.access import KeyRing, new_key, read_keys

HASHED = hashlib.sha256(b"secret").hexdigest()


@pytest.mark.parametrize("line", ["alice:secret", f"alice:sha256:{HASHED}", f"alice:sha256:{HASHED.upper()}"])
def test_a_line_is_a_name_with_a_key_or_its_digest(line: str) -> None:
    """A key in plain text and its digest let the same caller in."""
    ring = KeyRing(None, line)
    assert ring.caller_of(b"secret", 0.0) == "alice"
    assert ring.caller_of(b"Secret", 0.0) is None
    assert ring.caller_of(HASHED.encode(), 0.0) is None


def test_comments_and_blank_lines_are_passed_over() -> None:
    """Lines that begin with # and blank ones are no keys."""
    assert [key.name for key in read_keys("# who\n\n a:1\nb:2\n", "keys")] == ["a", "b"]


@pytest.mark.parametrize(
    "line",
    [
        "alice",
        "alice:",
        ":secret",
        "al ice:secret",
        "ali\u00e7e:x",
        "a:sha256:12",
        "a:s expires=soon",
        "a:s b",
        "a:\x01",
    ],
)
def test_an_error_names_the_line_and_hides_the_key(line: str) -> None:
    """What is no key is refused with the number of its line, and without what it says."""
    with pytest.raises(ValueError, match=r"line 2 of keys") as caught:
        read_keys(f"# first\n{line}\n", "keys")
    assert "secret" not in str(caught.value)


def test_a_key_ends_when_its_line_says() -> None:
    """A key is good until its expiry and not at it; a date without a zone is one of UTC."""
    ring = KeyRing(None, "a:one expires=1970-01-02\nb:two")
    assert ring.caller_of(b"one", 86_399.0) == "a"
    assert ring.caller_of(b"one", 86_400.0) is None
    assert (ring.next_expiry(0.0), ring.next_expiry(86_400.0)) == (86_400.0, inf)


def test_a_new_key_opens_by_its_line_and_is_not_in_it() -> None:
    """`carpool key` makes a key with a line that has only its digest."""
    key, line = new_key("alice", "2999-01-01")
    assert key not in line
    assert KeyRing(None, line).caller_of(key.encode(), 0.0) == "alice"
    assert new_key("alice")[0] != key
    with pytest.raises(ValueError, match="is no name of a key"):
        new_key("al:ice\n")


def test_a_ring_without_keys_is_refused(tmp_path: Path) -> None:
    """An empty file would lock everybody out, so it is an error at the start."""
    (tmp_path / "keys").write_text("# none\n")
    with pytest.raises(ValueError, match="there is no key in"):
        KeyRing(tmp_path / "keys")


def test_a_changed_file_is_read_again_and_a_broken_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a change the new keys count; a file that cannot be read leaves the old ones."""
    path = tmp_path / "keys"
    path.write_text("alice:secret\n")
    ring = KeyRing(path, "env:other")
    assert not ring.reload()
    path.write_text("bob:another\n")
    assert ring.reload()
    assert ring.caller_of(b"secret", 0.0) is None
    assert ring.caller_of(b"another", 0.0) == "bob"
    assert ring.caller_of(b"other", 0.0) == "env"
    path.write_text("broken\n")
    assert not ring.reload()
    assert ring.caller_of(b"another", 0.0) == "bob"
    assert "the keys stay as they are: line 1" in caplog.text


@pytest.mark.parametrize("text", ["", "# nobody\n\n", None], ids=["empty", "comments", "deleted"])
@pytest.mark.parametrize("more", ["", "env:other"], ids=["alone", "and the environment's"])
def test_the_last_key_that_is_taken_out_is_no_longer_good(tmp_path: Path, text: str | None, more: str) -> None:
    """If a file has no key any more, or is deleted, none of its keys opens the server, until there are some again."""
    path = tmp_path / "keys"
    path.write_text("bob:secret\n")
    ring = KeyRing(path, more)
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    assert ring.reload()
    assert ring.caller_of(b"secret", 0.0) is None
    assert (ring.caller_of(b"other", 0.0) == "env") is bool(more)
    assert not ring.reload()
    path.write_text("bob:secret\n")
    assert ring.reload()
    assert ring.caller_of(b"secret", 0.0) == "bob"


def test_a_file_that_all_can_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file of keys that every user can read is logged with the command that mends it."""
    path = tmp_path / "keys"
    path.write_text("alice:secret\n")
    os.chmod(path, 0o644)
    KeyRing(path)
    assert "chmod o=" in caplog.text
