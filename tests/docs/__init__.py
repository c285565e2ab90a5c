"""The documentation: what is generated for it, how its site is built, and the tests of both."""
