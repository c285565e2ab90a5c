"""The commands that operators type, each with its implementation. docs/how-to/runbooks/ has a page for each."""
