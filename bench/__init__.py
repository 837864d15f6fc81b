"""Comparisons of sluice with every other way to load weights, each way in its own fresh process."""
