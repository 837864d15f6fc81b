"""Fills modules, optimizers and state dicts: decide everything from headers, then read.

In: a request and an open checkpoint. Out: a job (decided, nothing touched), then its result.

Start with ``module_job.prepare_module`` and ``module_fill.fill``.
"""
