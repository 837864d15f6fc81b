"""The public functions. Each has a full docstring and a short body; ``sluice`` exports them by name."""
