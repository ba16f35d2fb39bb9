"""The commands. Thin: they read settings, call one function and show what it does."""

from npbml.cli.main import main

__all__ = ["main"]
