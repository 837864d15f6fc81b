"""One module per command: its options, one call of the API, and the view that prints the result."""
