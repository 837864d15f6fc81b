"""Loads into modules, optimizers and state dicts: everything is decided from headers, then data is read.

In: a request and an open checkpoint. Out: a job (decided, nothing touched), then its result and report.

Start with ``job.load``, which runs every load, and ``module_request.ModuleRequest``. A new kind of load is a request
and a job of its own; see ``job``.
"""
