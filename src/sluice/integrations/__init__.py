"""Official extension points of other libraries, with sluice reading and writing the files.

One module for each library, imported explicitly; it imports that library, and nothing of it is patched.
"""
