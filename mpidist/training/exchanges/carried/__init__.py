"""The state that elastic runs with parameter servers keep when a rank dies."""
