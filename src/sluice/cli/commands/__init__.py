"""One module per command: options, one call of the API, and the view that prints the result."""
