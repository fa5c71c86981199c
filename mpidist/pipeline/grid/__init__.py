"""On which host a stage is, in which order "pipedream" computes, and new cuts at a resume."""
