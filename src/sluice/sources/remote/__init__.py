"""Sources that are not on this machine: HTTP servers, object stores, the Hugging Face Hub and file systems of fsspec.

Each kind of server is a ``RemoteObject``, which makes single requests. ``RemoteFile`` turns it into a ``Source``: it
retries, resumes, and holds every answer against the object that was opened. With a cache directory, ``caching``
wraps it in a ``CachedFile``, or opens the complete copy.
"""
