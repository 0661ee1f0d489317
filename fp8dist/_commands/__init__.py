"""Commands of the command line, one module each. None imports torch before it runs."""
