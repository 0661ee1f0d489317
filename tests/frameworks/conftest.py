"""Lies here so that pytest puts this folder on `sys.path`: the tests import `common` and `snippets`."""
