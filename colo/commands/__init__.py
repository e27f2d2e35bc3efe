"""What a person runs, by way of cli.py."""
