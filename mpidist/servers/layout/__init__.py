"""The placement of a model on servers: what each holds, what messages carry, what fits."""
