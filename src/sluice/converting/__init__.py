"""From an open checkpoint to files under construction: what ``sluice.convert`` is made of."""
