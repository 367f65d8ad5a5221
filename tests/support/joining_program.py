"""A program with a service that workers join, for `carpool serve` and `carpool worker`."""

from __future__ import annotations

from tests.support.joining import where

service = where()
