"""What elastic runs with parameter servers carry from one communicator to the next."""
