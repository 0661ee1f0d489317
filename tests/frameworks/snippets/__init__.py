"""The loops of docs/frameworks.md as functions, run by the tests. A test compares the page with them, line by line."""
