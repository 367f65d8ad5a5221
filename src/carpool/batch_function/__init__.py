"""Batch functions: `@carpool.batch` lets the callers of one function share its calls."""
