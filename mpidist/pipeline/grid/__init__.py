"""Which host has which stage, in which order "pipedream" computes, and new cuts at a resume."""
