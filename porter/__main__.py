"""`python -m porter`: the same as the `porter` command."""

from porter.cli.app import main

if __name__ == "__main__":
    main()
