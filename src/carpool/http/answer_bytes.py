"""The bytes of an answer in HTTP/1.1 and HTTP/1.0: its status line, its headers, its chunks."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from carpool.http.exchange import HttpResponse
from carpool.http.request_ids import RequestIds
from carpool.http.server_state import HttpHead

LAST_CHUNK: Final = b"0\r\n\r\n"
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


def start_of_answer(response: HttpResponse, head: HttpHead, common: bytes, ids: RequestIds, *, is_last: bool) -> bytes:
    """Return everything of an answer that comes before its body.

    Args:
        response: The answer.
        head: The head of its request.
        common: The headers that every answer has in the present second.
        ids: Gives the answer an id if its client has given none.
        is_last: Whether the connection is closed after it.
    """
    status, body, content_type, headers = response
    headers = head.echoed(headers, ids)
    lines = [b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b"")), common]
    if response.describes_its_body:
        lines.append(b"content-type: %b\r\n" % content_type)
    lines += [b"%b: %b\r\n" % header for header in headers]
    if response.describes_its_body:
        lines.append(b"content-length: %d\r\n" % len(body))
    if is_last:
        lines.append(b"connection: close\r\n")
    elif head.is_http_1_0:
        lines.append(b"connection: keep-alive\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


def chunk(head: HttpHead, data: bytes) -> bytes:
    """Return a piece of a body whose length is not known, as the client's version has it."""
    if head.is_http_1_0 or not data:
        return data
    return b"%x\r\n%b\r\n" % (len(data), data)


def ends_with_answer(head: HttpHead) -> bool:
    """Report whether the connection closes after an answer in parts."""
    return head.is_http_1_0 or not head.keep_alive
