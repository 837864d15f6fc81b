"""Classes and functions of sluice for the official extension points of other libraries.

One module for each library, imported explicitly; it imports that library, and nothing of it is patched.
"""
