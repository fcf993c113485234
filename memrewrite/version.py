"""The version of memrewrite, which reports and artifacts carry."""

__version__ = "0.1.0"
