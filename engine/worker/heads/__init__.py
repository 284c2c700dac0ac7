"""The MTP heads that the libraries' checkpoints come with, one file for each form."""
