"""The results that sluice returns: loads, plans, saves, verifications and comparisons, and how they are rendered.

In: what happened, as numbers and records. Out: text, tables and JSON. Torch is not imported.
"""
