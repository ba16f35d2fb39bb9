"""The version of npbml, and nothing else, so that reading it costs nothing."""

__version__ = "0.2.0.dev0"
