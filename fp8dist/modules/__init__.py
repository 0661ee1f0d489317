"""Modules that compute in FP8. They hold slots and know nothing of ranks."""
