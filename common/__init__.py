"""What every recipe needs right and can easily get silently wrong."""
