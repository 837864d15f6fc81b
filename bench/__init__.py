"""Comparisons of sluice with other methods of loading weights, each in a fresh process."""
