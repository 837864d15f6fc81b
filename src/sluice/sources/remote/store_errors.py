"""Errors of obstore, as errors of sluice.

Their text holds the whole answer of the server, which may repeat signatures and key ids. Only the status, the error
code of the store and the kind of failure are taken from it.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from sluice._errors import MissingFileError, SourceChangedError, UnsupportedError
from sluice.sources.remote.protocol import RequestFailedError

__all__ = ["is_missing", "translated"]

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_KIND = re.compile(r"HttpError \{\s*kind: (\w{1,30})")

#: Status if the object ends before the range begins.
_OUTSIDE = 416

#: Statuses below 500 after which the same request may succeed.
_TEMPORARY = {408, 425, 429}

#: Parts of requests to the metadata services of clouds, which obstore asks for credentials last.
_METADATA = ("/latest/api/token", "/latest/meta-data/", "metadata.google.internal", "/metadata/identity/")

_FAILURES = {
    "Connect": "the server cannot be reached",
    "Timeout": "the server did not answer in time",
    "Interrupted": "the connection was interrupted",
    "Decode": "the answer cannot be decoded",
}

_CREDENTIALS = {
    "s3": (
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL), or "
        "install boto3 to use AWS_PROFILE; AWS_SKIP_SIGNATURE=true reads a public bucket."
    ),
    "gs": (
        "Run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to the file of a service "
        "account; GOOGLE_SKIP_SIGNATURE=true reads a public bucket."
    ),
    "az": (
        "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN; "
        "AZURE_SKIP_SIGNATURE=true reads a public container."
    ),
}
_REGION = "Set AWS_REGION to the region of the bucket, and AWS_ENDPOINT_URL if it is not a bucket of AWS."


def is_missing(error: BaseException) -> bool:
    """Return whether an error says that there is no such object or bucket."""
    return isinstance(error, FileNotFoundError) or type(error).__name__ == "NotFoundError"


def translated(error: BaseException, path: str, *, pinned: bool) -> Exception:
    """Return the error to raise instead.

    Args:
        error: An error of obstore.
        path: The object, without credentials.
        pinned: Whether the object has been opened before, so that it is missing because it was removed.
    """
    text = str(error)
    code = found[1] if (found := _CODE.search(text)) else ""
    if code in {"NoSuchBucket", "ContainerNotFound"}:
        return MissingFileError("the bucket does not exist", file=path, advice="Check its name and the endpoint.")
    if is_missing(error):
        if pinned:
            return SourceChangedError("the object was removed while it was being read", file=path)
        return MissingFileError("there is no such object", file=path, advice="Check the bucket and the key.")
    if type(error).__name__ == "PreconditionError" or (pinned and _status_of(text) == _OUTSIDE):
        return SourceChangedError("the object was replaced while it was being read", file=path)
    if type(error).__name__ == "InvalidPathError" or (isinstance(error, ValueError) and "Could not parse path" in text):
        return MissingFileError("the store has no objects with such names", file=path)
    if "non-partial" in text:
        problem = "the server answers requests for a range with the whole object"
        return UnsupportedError(problem, file=path, advice="Download the object and pass its local path.")
    return _failure(error, path, code)


def _failure(error: BaseException, path: str, code: str) -> RequestFailedError:
    """Return what the retries of ``RemoteFile`` judge."""
    text = str(error)
    status = _status_of(text)
    scheme = path.partition("://")[0].lower()
    credentials = _CREDENTIALS.get({"s3a": "s3", "gs": "gs", "s3": "s3"}.get(scheme, "az"))
    final = partial(RequestFailedError, temporary=False, advice=credentials)
    refusals = {"PermissionDeniedError", "UnauthenticatedError", "PermissionError"}
    if type(error).__name__ in refusals or status in {401, 403}:
        return final(f"the store refused access{_in_brackets(status, code)}", status=status)
    if any(part in text for part in _METADATA):
        return final("no credentials were found")
    if status is None:
        kind = found[1] if (found := _KIND.search(text)) else ""
        return RequestFailedError(_FAILURES.get(kind, "the request failed"), temporary=True)
    advice = _REGION if status in {301, 307, 308} or (status == 400 and "s3" in scheme) else None
    problem = f"the store answered with an error{_in_brackets(status, code)}"
    return RequestFailedError(problem, temporary=status >= 500 or status in _TEMPORARY, status=status, advice=advice)


def _status_of(text: str) -> int | None:
    """Return the status of the answer that the text of an error reports, or None."""
    if "StartTooLarge" in text:  # of stores without a server
        return _OUTSIDE
    return int(found[1]) if (found := _STATUS.search(text)) else None


def _in_brackets(status: int | None, code: str) -> str:
    said: list[Any] = [each for each in (status, code) if each]
    return f" ({' '.join(map(str, said))})" if said else ""
