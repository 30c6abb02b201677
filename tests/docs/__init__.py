"""What is written for users is true."""
