"""Where a model lies: what each server holds, what a message carries of it, and whether it fits."""
