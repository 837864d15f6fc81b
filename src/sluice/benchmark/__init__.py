"""Comparison of loading methods, each in a process of its own: the core of ``sluice bench`` and of ``bench/``.

In: a model, a checkpoint and names of methods. Out: time, memory and correctness of each, as tables and files.

Entry functions: ``comparison.scenario`` plans a table, ``runner.run_with_progress`` runs it, and ``results`` shows it.
"""
