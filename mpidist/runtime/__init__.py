"""The state that mpidist keeps for a communicator; how ranks wait, agree, fail and end."""
