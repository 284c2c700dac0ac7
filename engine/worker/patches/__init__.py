"""Patches of the libraries, one file each: the reason, the version, and when it can be removed."""
