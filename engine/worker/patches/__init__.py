"""What the libraries lack here, one file each: why, in which version, and when it can go."""
