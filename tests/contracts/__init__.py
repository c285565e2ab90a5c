"""Machine-readable contracts: JSON Schema and AsyncAPI documents made from the types that decode and encode.

`make docs` writes them to docs/reference/schemas; the tests of this folder compare them with the code and the files.
"""
