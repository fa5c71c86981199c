"""parameter_server."""
