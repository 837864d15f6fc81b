from support.transformers_fixtures import _without_threads, transformers

__all__ = ["_without_threads", "transformers"]
