"""The rewrites, one per file; each is a frozen dataclass that keeps the contract of ``rewriting.contract.Pass``."""

if __name__ != "memrewrite.passes":
    raise ImportError(f"Import this package as memrewrite.passes, not as {__name__}.")
