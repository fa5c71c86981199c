"""What this cluster could do better, and why `auto` chose as it did: measured, then in words."""
