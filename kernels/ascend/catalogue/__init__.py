"""What the vendor's operators take, as data."""
