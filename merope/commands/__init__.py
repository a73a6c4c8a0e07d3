"""The subcommands of `merope`: parse, call, print. Heavy imports happen inside the functions."""
