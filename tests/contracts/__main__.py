"""Write the contracts: `make docs` runs `python -m tests.contracts`."""

from tests.contracts.files import write

if __name__ == "__main__":
    write()
