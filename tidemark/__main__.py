"""`python -m tidemark` is the command `tidemark`."""

from tidemark.app.cli import main

if __name__ == "__main__":
    main()
