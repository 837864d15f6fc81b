"""Loading methods side by side, each in a process of its own: what ``sluice bench`` and the repository's bench/ run."""
