"""Protocols of other servers, and bulk, beside the native route."""
